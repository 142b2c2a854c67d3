"""The search for the price of bits: which supergroups get how many."""
