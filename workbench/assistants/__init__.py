"""What coding assistants are served: configs and run folders over the Model Context Protocol (modelcontextprotocol.io), on
standard input and output alone.

The tools are the commands' own cores; nothing is decided here but what an assistant may reach, and what a person is asked
before a run starts or stops. Only `server`, `tools`, `consent` and `resources` need the library `mcp`.
"""
