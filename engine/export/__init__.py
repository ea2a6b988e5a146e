"""A run's model taken along: an adapter merged into its base, folders and files that other programs open, a push to a hub.

What is asked for and where it goes is read without torch (`places`, `process`); the work is done by `python -m engine.export`
in a process of its own. Every part is written beside its place, opened again by another reader and compared, and only then
gets its name.
"""
