"""All code with side effects: files, hosts, processes, Ray; everything else is pure."""
