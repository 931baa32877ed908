"""Published methods that dquantcodec is compared with, one a file, written anew from their papers.

Each module has ``methods()`` and says in its docstring what it stores, what its constants are and what it leaves out.
All of them code every token they are given: windows of recent exact tokens, which most of these methods keep, are
left to whoever runs the comparison, so that they are the same for all.
"""
