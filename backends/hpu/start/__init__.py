"""How a Gaudi is found and opened: the environment, the installed plug-in, the emulator."""
