//! The byte layout of values in shared data: little endian, fixed widths, so
//! that the most bytes of a value follow from its bounds.

/// Writes a value.
#[derive(Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// A writer with room for so many bytes.
    pub fn with_capacity(bytes: usize) -> Self {
        Writer(Vec::with_capacity(bytes))
    }

    /// A byte.
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    /// Four bytes.
    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Sixteen bytes.
    pub fn u128(&mut self, value: u128) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// So many bytes, as they are.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// A part with its length before it, in four bytes.
    pub fn block(&mut self, write: impl FnOnce(&mut Self)) {
        let at = self.0.len();
        self.u32(0);
        let start = self.0.len();
        write(self);
        let len = u32::try_from(self.0.len().saturating_sub(start)).unwrap_or(u32::MAX);
        if let Some(place) = self.0.get_mut(at..start) {
            place.copy_from_slice(&len.to_le_bytes());
        }
    }

    /// A list: its length in a byte, then its items; what is over 255 is left
    /// out, so the caller bounds it.
    pub fn list<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Self, &T)) {
        let len = u8::try_from(items.len()).unwrap_or(u8::MAX);
        self.u8(len);
        for item in items.iter().take(usize::from(len)) {
            write(self, item);
        }
    }

    /// What was written.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads a value; `None` where it ends too early.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// A reader at the start.
    pub fn new(bytes: &'a [u8]) -> Self {
        Reader(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    /// A byte.
    pub fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Sixteen bytes.
    pub fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }

    /// A list, as [`Writer::list`] writes it.
    pub fn list<T>(&mut self, mut read: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let len = self.u8()?;
        (0..len).map(|_| read(self)).collect()
    }

    /// So many bytes.
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }
}
