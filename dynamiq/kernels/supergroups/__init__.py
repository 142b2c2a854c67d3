"""DynamiQ's kernels: supergroups of 256 entries in energy order, codes of several widths."""
