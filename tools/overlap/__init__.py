"""The overlap benchmark: namespaces as links, variants, formulas and pages."""
