"""`make interop`: the guard between the clients and servers that people run, measured directly and
through a real Envoy. What came of it is docs/interop.md.

`parts/` has the parts, `servers/` and `clients/` small programs of ours around the real SDKs, and
`npm/` and `python/` say exactly which versions those are.
"""
