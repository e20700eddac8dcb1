#pragma once
#define WAYPOINT(text)
