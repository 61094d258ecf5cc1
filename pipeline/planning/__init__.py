"""What a job needs, counted on shapes."""
