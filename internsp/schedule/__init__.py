"""Pure: which weight is gathered, held, released and reduced, and when; no process group."""
