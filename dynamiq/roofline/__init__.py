"""How near the kernels come to what a machine can do: bytes moved, instructions, what binds."""
