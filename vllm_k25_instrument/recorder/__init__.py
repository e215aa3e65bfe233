"""How a step is timed: the recorder and the devices it takes its marks from."""
