//! A proxy-wasm filter that does nothing, or the least.
//!
//! Envoy enters it as often as it enters a filter that reads headers and
//! bodies both ways: request headers, request body, response headers, response
//! body (for each chunk), log, done, delete. Without a configuration none reads
//! anything, so what it costs is the floor of the ABI: no filter on proxy-wasm
//! can cost less.
//!
//! With the configuration `reads and writes` it makes the calls to the host
//! that a guard of event streams can't do without, and does nothing with what
//! they give: it reads both header maps, a value of shared data for each
//! request, and every chunk, and writes a value for each chunk of a response.

#[cfg(target_arch = "wasm32")]
mod filter {
    use proxy_wasm::hostcalls;
    use proxy_wasm::traits::{Context, HttpContext, RootContext};
    use proxy_wasm::types::{Action, BufferType, ContextType, MapType};

    /// About as long as a record of the guard's.
    const VALUE: [u8; 120] = [7; 120];

    #[allow(unsafe_code, reason = "the SDK's entry point is an exported function")]
    mod entry {
        proxy_wasm::main! {{
            proxy_wasm::set_root_context(|_| Box::<super::Root>::default());
        }}
    }

    #[derive(Default)]
    struct Root {
        works: bool,
    }

    impl Context for Root {}

    impl RootContext for Root {
        fn on_configure(&mut self, _: usize) -> bool {
            self.works = self.get_plugin_configuration().as_deref() == Some(b"reads and writes");
            true
        }

        fn create_http_context(&self, context: u32) -> Option<Box<dyn HttpContext>> {
            let key = self.works.then(|| format!("noop.{}", context % 64));
            Some(Box::new(Stream { key }))
        }

        fn get_type(&self) -> Option<ContextType> {
            Some(ContextType::HttpContext)
        }
    }

    struct Stream {
        /// The value that it reads and writes, if it is to.
        key: Option<String>,
    }

    impl Stream {
        fn read_map(&self, map: MapType) {
            if self.key.is_some() {
                read_map(map);
            }
        }

        fn read_chunk(&self, buffer: BufferType, size: usize) {
            if self.key.is_some() {
                let _ = hostcalls::get_buffer(buffer, 0, size);
            }
        }
    }

    /// As the host gives it: the SDK takes it to pieces, which costs more.
    fn read_map(map: MapType) {
        #[allow(unsafe_code, reason = "the SDK gives it in pieces only")]
        mod host {
            unsafe extern "C" {
                pub fn proxy_get_header_map_pairs(
                    map: u32,
                    data: *mut *mut u8,
                    len: *mut usize,
                ) -> u32;
            }
        }
        let (mut data, mut len) = (std::ptr::null_mut(), 0);
        #[allow(unsafe_code, reason = "the host hands over memory of ours")]
        // SAFETY: the pointers are those of two variables; what comes back is a
        // block that the host has got from the SDK, and nobody's but ours.
        unsafe {
            let status = host::proxy_get_header_map_pairs(map as u32, &mut data, &mut len);
            if status == 0 && !data.is_null() {
                drop(Vec::from_raw_parts(data, len, len));
            }
        }
    }

    impl Context for Stream {}

    impl HttpContext for Stream {
        fn on_http_request_headers(&mut self, _: usize, _: bool) -> Action {
            self.read_map(MapType::HttpRequestHeaders);
            if let Some(key) = &self.key {
                let _ = hostcalls::get_shared_data(key);
            }
            Action::Continue
        }

        fn on_http_request_body(&mut self, size: usize, _: bool) -> Action {
            self.read_chunk(BufferType::HttpRequestBody, size);
            Action::Continue
        }

        fn on_http_response_headers(&mut self, _: usize, _: bool) -> Action {
            self.read_map(MapType::HttpResponseHeaders);
            Action::Continue
        }

        fn on_http_response_body(&mut self, size: usize, _: bool) -> Action {
            self.read_chunk(BufferType::HttpResponseBody, size);
            if let Some(key) = &self.key {
                let _ = hostcalls::set_shared_data(key, Some(&VALUE), None);
            }
            Action::Continue
        }
    }
}
