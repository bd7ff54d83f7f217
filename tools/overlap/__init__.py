"""What only the benchmark of overlap needs: namespaces as a link, variants, its laws and pages."""
