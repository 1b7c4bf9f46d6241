"""The ways through the layers, one module a command: inspecting, making, verifying."""
