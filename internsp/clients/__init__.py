"""Other programs' loops over a parallel model; each module needs an optional package of its own."""
