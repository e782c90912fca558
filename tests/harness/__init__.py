"""What the end-to-end tests, the demo and `make run` share: a real Envoy with the project's
`envoy/envoy.yaml`, an MCP upstream that does exactly what a test says, and a client that sees
every byte with its time.

Everything listens on 127.0.0.1, on ports that the system chose, and is ended by its process id.
"""
