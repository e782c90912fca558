//! mcp-resume-guard.
