"""The engine core: requests, the planner, the step loop, and assembly from plugins."""
