"""What people see: tables, and later one static page."""
