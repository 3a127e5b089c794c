"""What `import shoal` and the `shoal` command offer: one file per verb, one function in it, with the same words.

A function takes a job as an object, a file or a built-in name, and a strategy as text or as an object. It prints
nothing: progress goes to the `shoal` logger or to a function that is given, results are returned as typed objects.
"""
