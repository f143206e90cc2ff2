"""For tests of programs that embed the engine: a fake device and a scripted model."""
