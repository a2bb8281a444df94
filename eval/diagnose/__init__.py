"""Why tau is what it is: every first miss of a draft under one cause."""
