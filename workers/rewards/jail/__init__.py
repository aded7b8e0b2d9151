"""Where programs run that a model wrote: shut off, bounded, and gone afterwards."""
