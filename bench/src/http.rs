//! As much of HTTP/1.1 as both ends of the bench need.
//!
//! Written on the socket itself, because what is measured depends on it: one
//! event has to be one chunk and one write, and the next must not be sent
//! before the client has seen it. `httparse` reads the heads.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail, ensure};
use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Read at once at the most: as much as Envoy passes on in one chunk.
const READ_SIZE: usize = 1024 * 1024;

const MAX_HEADERS: usize = 32;

/// The header of the session.
pub const SESSION: &str = "mcp-session-id";

/// The header of the cursor.
pub const CURSOR: &str = "last-event-id";

/// The header of the guard's verdict.
pub const VERDICT: &str = "mcp-resumption";

/// The last chunk of a chunked body.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// A connection, and what was read of it and not taken yet.
pub struct Connection {
    stream: TcpStream,
    read: BytesMut,
    body: Framing,
}

/// How much of a body is still to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    /// So many bytes.
    Length(usize),
    /// A chunk's size comes next.
    ChunkSize,
    /// So many bytes of a chunk.
    Chunk(usize),
    /// The line end behind a chunk.
    ChunkEnd,
}

/// The head of a request.
#[derive(Debug, Default)]
pub struct Request {
    /// The method.
    pub method: String,
    /// The value of `mcp-session-id`.
    pub session: Option<String>,
    /// The value of `last-event-id`.
    pub cursor: Option<String>,
}

/// The head of a response.
#[derive(Debug, Default)]
pub struct Response {
    /// The status.
    pub status: u16,
    /// The value of `mcp-session-id`.
    pub session: Option<String>,
    /// The value of `mcp-resumption`.
    pub verdict: Option<String>,
    /// Whether the body is `text/event-stream`.
    pub is_stream: bool,
}

impl Connection {
    /// Connects to a server.
    pub async fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await;
        Self::new(stream.with_context(|| format!("can't connect to {address}"))?)
    }

    /// A connection that is there.
    pub fn new(stream: TcpStream) -> Result<Self> {
        // What is written has to go at once, or latencies are those of Nagle.
        stream.set_nodelay(true)?;
        Ok(Connection { stream, read: BytesMut::new(), body: Framing::Length(0) })
    }

    /// Writes all of it.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.stream.write_all(bytes).await?)
    }

    /// The head of the next request; `None` if the client has closed.
    pub async fn request(&mut self) -> Result<Option<Request>> {
        loop {
            let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
            let mut head = httparse::Request::new(&mut headers);
            if let httparse::Status::Complete(size) = head.parse(&self.read)? {
                let mut request = Request {
                    method: head.method.unwrap_or_default().to_owned(),
                    ..Request::default()
                };
                self.body = framing(head.headers)?.unwrap_or(Framing::Length(0));
                for header in head.headers {
                    let name = header.name;
                    if name.eq_ignore_ascii_case(SESSION) {
                        request.session = Some(text(header)?);
                    } else if name.eq_ignore_ascii_case(CURSOR) {
                        request.cursor = Some(text(header)?);
                    }
                }
                self.read.advance(size);
                return Ok(Some(request));
            }
            if self.fill().await? == 0 {
                ensure!(self.read.is_empty(), "the client closed within a request");
                return Ok(None);
            }
        }
    }

    /// The head of the next response.
    pub async fn response(&mut self) -> Result<Response> {
        loop {
            let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
            let mut head = httparse::Response::new(&mut headers);
            if let httparse::Status::Complete(size) = head.parse(&self.read)? {
                let mut response =
                    Response { status: head.code.unwrap_or_default(), ..Response::default() };
                self.body = match framing(head.headers)? {
                    Some(framing) => framing,
                    None if response.status == 202 => Framing::Length(0),
                    None => bail!("a response ({}) without a length", response.status),
                };
                for header in head.headers {
                    let name = header.name;
                    if name.eq_ignore_ascii_case(SESSION) {
                        response.session = Some(text(header)?);
                    } else if name.eq_ignore_ascii_case(VERDICT) {
                        response.verdict = Some(text(header)?);
                    } else if name.eq_ignore_ascii_case("content-type") {
                        response.is_stream = header.value.starts_with(b"text/event-stream");
                    }
                }
                self.read.advance(size);
                return Ok(response);
            }
            ensure!(self.fill().await? > 0, "the server closed instead of an answer");
        }
    }

    /// The next bytes of the body, as they come; `None` at its end.
    pub async fn data(&mut self) -> Result<Option<Bytes>> {
        loop {
            match self.body {
                Framing::Length(0) => return Ok(None),
                Framing::Length(left) if !self.read.is_empty() => {
                    let taken = self.read.split_to(left.min(self.read.len())).freeze();
                    self.body = Framing::Length(left - taken.len());
                    return Ok(Some(taken));
                }
                Framing::Chunk(left) if !self.read.is_empty() => {
                    let taken = self.read.split_to(left.min(self.read.len())).freeze();
                    self.body = match left - taken.len() {
                        0 => Framing::ChunkEnd,
                        left => Framing::Chunk(left),
                    };
                    return Ok(Some(taken));
                }
                Framing::ChunkEnd if self.read.len() >= 2 => {
                    self.read.advance(2);
                    self.body = Framing::ChunkSize;
                    continue;
                }
                Framing::ChunkSize => match httparse::parse_chunk_size(&self.read) {
                    // Without trailers an empty line is all that follows.
                    Ok(httparse::Status::Complete((start, 0))) if self.read.len() >= start + 2 => {
                        self.read.advance(start + 2);
                        self.body = Framing::Length(0);
                        continue;
                    }
                    Ok(httparse::Status::Complete((start, size))) if size > 0 => {
                        self.read.advance(start);
                        self.body = Framing::Chunk(usize::try_from(size)?);
                        continue;
                    }
                    Ok(_) => {}
                    Err(_) => bail!("not a chunk's size"),
                },
                Framing::Length(_) | Framing::Chunk(_) | Framing::ChunkEnd => {}
            }
            ensure!(self.fill().await? > 0, "closed within a body");
        }
    }

    /// The rest of the body.
    pub async fn body(&mut self) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        while let Some(data) = self.data().await? {
            body.extend_from_slice(&data);
        }
        Ok(body)
    }

    async fn fill(&mut self) -> Result<usize> {
        // Enough for a head or an event; a full buffer grows up to the most.
        let room = (2 * self.read.len()).clamp(16 * 1024, READ_SIZE);
        self.read.reserve(room);
        Ok(self.stream.read_buf(&mut self.read).await?)
    }
}

fn framing(headers: &[httparse::Header<'_>]) -> Result<Option<Framing>> {
    for header in headers {
        if header.name.eq_ignore_ascii_case("content-length") {
            return Ok(Some(Framing::Length(text(header)?.parse()?)));
        }
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Ok(Some(Framing::ChunkSize));
        }
    }
    Ok(None)
}

fn text(header: &httparse::Header<'_>) -> Result<String> {
    Ok(std::str::from_utf8(header.value)?.to_owned())
}
