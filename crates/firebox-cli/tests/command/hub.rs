//! A server with the hub's interface, for one model, on this machine.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// One request, as the server saw it.
#[derive(Debug, Clone, Default)]
pub struct Request {
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
}

/// The behaviour of the server.
#[derive(Debug, Clone, Default)]
pub struct Behaviour {
    /// Answers everything with this status.
    pub status: Option<u16>,
    /// Breaks the connection after so many bytes of a file of this name, as often as the number says.
    pub cut: Option<(String, usize, usize)>,
}

pub struct Hub {
    pub endpoint: String,
    requests: Arc<Mutex<Vec<Request>>>,
    behaviour: Arc<Mutex<Behaviour>>,
    closing: Arc<AtomicBool>,
    address: std::net::SocketAddr,
}

impl Hub {
    /// Serves these files as the model `org/name`.
    pub fn serve(files: Vec<(String, Vec<u8>)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let hub = Self {
            endpoint: format!("http://{address}"),
            requests: Arc::default(),
            behaviour: Arc::default(),
            closing: Arc::default(),
            address,
        };
        let (requests, behaviour, closing) =
            (hub.requests.clone(), hub.behaviour.clone(), hub.closing.clone());
        let files = Arc::new(files);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if closing.load(Ordering::SeqCst) {
                    break;
                }
                let (files, requests, behaviour) = (files.clone(), requests.clone(), behaviour.clone());
                let stream = stream.unwrap();
                std::thread::spawn(move || {
                    // A client that leaves in the middle is part of what is tested.
                    let _ = answer(stream, &files, &requests, &behaviour);
                });
            }
        });
        hub
    }

    pub fn behave(&self, behaviour: Behaviour) {
        *self.behaviour.lock().unwrap() = behaviour;
    }

    /// The requests since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::SeqCst);
        // Wakes the listener, so that it sees that it is to end.
        let _ = TcpStream::connect(self.address);
    }
}

fn answer(
    mut stream: TcpStream,
    files: &[(String, Vec<u8>)],
    requests: &Mutex<Vec<Request>>,
    behaviour: &Mutex<Behaviour>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let mut request = Request::default();
    let first = lines.next().transpose()?.unwrap_or_default();
    request.path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => request.range = Some(value.to_owned()),
            "authorization" => request.token = Some(value.to_owned()),
            _ => {}
        }
    }
    requests.lock().unwrap().push(request.clone());
    if let Some(status) = behaviour.lock().unwrap().status {
        return write!(stream, "HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
    if request.path == "/api/models/org/name/revision/main" {
        let siblings: Vec<_> = files.iter().map(|(name, _)| serde_json::json!({"rfilename": name})).collect();
        let body = serde_json::json!({"id": "org/name", "sha": COMMIT, "siblings": siblings}).to_string();
        return write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
    }
    let file = request.path.strip_prefix("/org/name/resolve/main/");
    let Some((name, bytes)) = file.and_then(|file| files.iter().find(|(name, _)| name == file)) else {
        return write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    };
    let (from, to) = asked_range(request.range.as_deref(), bytes.len());
    if from >= bytes.len() && !bytes.is_empty() {
        return write!(stream, "HTTP/1.1 416 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
    write!(
        stream,
        "HTTP/1.1 206 Partial Content\r\nETag: \"etag-of-{}\"\r\nX-Repo-Commit: {COMMIT}\r\nAccept-Ranges: bytes\r\n\
         Content-Range: bytes {from}-{}/{}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        name.replace(['/', '.'], "-"),
        to.saturating_sub(1),
        bytes.len(),
        to - from
    )?;
    let mut until = to;
    // The single byte with which a client asks for the size is never cut.
    if to - from > 1
        && let Some((cut, after, times)) = &mut behaviour.lock().unwrap().cut
        && cut == name
        && *times > 0
    {
        *times -= 1;
        until = to.min(from + *after);
    }
    stream.write_all(&bytes[from..until])
}

fn asked_range(range: Option<&str>, len: usize) -> (usize, usize) {
    let Some((from, to)) = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) else {
        return (0, len);
    };
    let to = to.parse().map_or(len, |last: usize| (last + 1).min(len));
    (from.parse().unwrap_or(0), to)
}
