"""How far sums are off: the vNMSE of a format on a topology, from a gradient's spectrum."""
