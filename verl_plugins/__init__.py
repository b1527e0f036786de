"""Trust-region masks, prefix sampling, token reweighting and credit assignment for verl, as a plugin."""

__version__ = "0.1.0"
