//! A proxy-wasm filter that does nothing.
//!
//! Envoy enters it as often as it enters a filter that reads headers and
//! bodies both ways: request headers, request body, response headers, response
//! body (for each chunk), log, done, delete. None reads anything, so what it
//! costs is the floor of the ABI: no filter on proxy-wasm can cost less.

#[cfg(target_arch = "wasm32")]
mod filter {
    use proxy_wasm::traits::{Context, HttpContext, RootContext};
    use proxy_wasm::types::ContextType;

    #[allow(unsafe_code, reason = "the SDK's entry point is an exported function")]
    mod entry {
        proxy_wasm::main! {{
            proxy_wasm::set_root_context(|_| Box::new(super::Root));
        }}
    }

    struct Root;

    impl Context for Root {}

    impl RootContext for Root {
        fn create_http_context(&self, _: u32) -> Option<Box<dyn HttpContext>> {
            Some(Box::new(Stream))
        }

        fn get_type(&self) -> Option<ContextType> {
            Some(ContextType::HttpContext)
        }
    }

    /// The SDK's defaults of all callbacks: go on.
    struct Stream;

    impl Context for Stream {}

    impl HttpContext for Stream {}
}
