from . import FOLDER

print(FOLDER)
