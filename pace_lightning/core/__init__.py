"""Every formula and every type; importable with torch and the standard library alone."""
