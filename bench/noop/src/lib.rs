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
//! Of a random id it also reads and writes who else was sent it. Of a
//! resumption it also reads what the stream issued, asks whether the answer is
//! the upstream's, and tells the verdict: in a header, in the filter state, and
//! in a counter each for the verdict and for the replay.

#[cfg(target_arch = "wasm32")]
mod filter {
    use proxy_wasm::hostcalls;
    use proxy_wasm::traits::{Context, HttpContext, RootContext};
    use proxy_wasm::types::{Action, BufferType, Bytes, ContextType, MapType, MetricType};

    /// About as long as a record of the guard's.
    const VALUE: [u8; 120] = [7; 120];

    /// As long as a full bucket of the guard's index.
    const BUCKET: [u8; 706] = [7; 706];
    const BUCKET_KEY: &str = "noop.id";

    const CURSOR: &[u8] = b"last-event-id";

    #[allow(unsafe_code, reason = "the SDK's entry point is an exported function")]
    mod entry {
        proxy_wasm::main! {{
            proxy_wasm::set_root_context(|_| Box::<super::Root>::default());
        }}
    }

    #[derive(Default)]
    struct Root {
        works: bool,
        counter: u32,
    }

    impl Context for Root {}

    impl RootContext for Root {
        fn on_configure(&mut self, _: usize) -> bool {
            self.works = self.get_plugin_configuration().as_deref() == Some(b"reads and writes");
            let counter = hostcalls::define_metric(MetricType::Counter, "noop");
            self.counter = counter.unwrap_or_default();
            true
        }

        fn create_http_context(&self, context: u32) -> Option<Box<dyn HttpContext>> {
            let key = self.works.then(|| format!("noop.{}", context % 64));
            Some(Box::new(Stream { key, counter: self.counter, resumes: false }))
        }

        fn get_type(&self) -> Option<ContextType> {
            Some(ContextType::HttpContext)
        }
    }

    struct Stream {
        /// The value that it reads and writes, if it is to.
        key: Option<String>,
        counter: u32,
        resumes: bool,
    }

    impl Stream {
        fn read_chunk(&self, buffer: BufferType, size: usize) -> Option<Bytes> {
            self.key.as_ref()?;
            hostcalls::get_buffer(buffer, 0, size).ok().flatten()
        }

        /// The value that says who was sent an id.
        fn note_id() {
            let _ = hostcalls::get_shared_data(BUCKET_KEY);
            let _ = hostcalls::set_shared_data(BUCKET_KEY, Some(&BUCKET), None);
        }

        fn tell_verdict(&self) {
            let _ = hostcalls::get_property(vec!["response", "code_details"]);
            let _ = hostcalls::set_property(vec!["noop"], Some(b"continue"));
            self.set_http_response_header("noop", Some("continue"));
            for _ in 0..2 {
                let _ = hostcalls::increment_metric(self.counter, 1);
            }
        }
    }

    /// Whether one of the names in a header map is the cursor's: first stand the
    /// number of fields and the lengths of each, and then their texts.
    fn has_cursor(map: &[u8]) -> bool {
        let (numbers, _) = map.as_chunks::<4>();
        let mut numbers = numbers.iter().map(|number| u32::from_le_bytes(*number) as usize);
        let count = numbers.next().unwrap_or_default();
        let mut at = 4 + 8 * count;
        (0..count).any(|_| {
            let (name, value) = (numbers.next(), numbers.next());
            let (start, name, value) = (at, name.unwrap_or_default(), value.unwrap_or_default());
            at += name + value + 2;
            map.get(start..start + name) == Some(CURSOR)
        })
    }

    /// Whether a chunk begins with an event whose id is a UUID.
    fn has_random_id(chunk: &[u8]) -> bool {
        chunk.get("id: 01234567".len()) == Some(&b'-')
    }

    /// As the host gives it: the SDK takes it to pieces, which costs more.
    fn read_map(map: MapType) -> Vec<u8> {
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
            if status != 0 || data.is_null() {
                return Vec::new();
            }
            Vec::from_raw_parts(data, len, len)
        }
    }

    impl Context for Stream {}

    impl HttpContext for Stream {
        fn on_http_request_headers(&mut self, _: usize, _: bool) -> Action {
            if let Some(key) = &self.key {
                self.resumes = has_cursor(&read_map(MapType::HttpRequestHeaders));
                for _ in 0..=usize::from(self.resumes) {
                    let _ = hostcalls::get_shared_data(key);
                }
            }
            Action::Continue
        }

        fn on_http_request_body(&mut self, size: usize, _: bool) -> Action {
            self.read_chunk(BufferType::HttpRequestBody, size);
            Action::Continue
        }

        fn on_http_response_headers(&mut self, _: usize, _: bool) -> Action {
            if self.key.is_some() {
                read_map(MapType::HttpResponseHeaders);
            }
            if self.resumes {
                self.tell_verdict();
            }
            Action::Continue
        }

        fn on_http_response_body(&mut self, size: usize, _: bool) -> Action {
            let chunk = self.read_chunk(BufferType::HttpResponseBody, size);
            if let Some(key) = &self.key {
                let _ = hostcalls::set_shared_data(key, Some(&VALUE), None);
            }
            if chunk.is_some_and(|chunk| has_random_id(&chunk)) {
                Self::note_id();
            }
            Action::Continue
        }
    }
}
