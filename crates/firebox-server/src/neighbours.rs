use std::net::{IpAddr, Ipv6Addr};

use crate::ServerError;

/// Whom a browser may ask for beside the server's own pages: pages of these origins, and requests by which this machine is called
/// by these names. Where none are said, there are none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Neighbours {
    origins: Vec<String>,
    hosts: Vec<String>,
}

impl Neighbours {
    /// Pages of these origins, as in `https://app.example`, and requests to these names, as in `models.example`.
    pub fn new(
        origins: impl IntoIterator<Item = String>,
        hosts: impl IntoIterator<Item = String>,
    ) -> Result<Self, ServerError> {
        let origins = origins.into_iter().map(|origin| {
            let plain = plain_origin(&origin);
            plain.ok_or(ServerError::Origin { origin })
        });
        let hosts = hosts.into_iter().map(|host| {
            // An address is this machine's own already, and does no harm.
            if is_name(&host) || is_address(&host) { Ok(host) } else { Err(ServerError::Host { host }) }
        });
        Ok(Self { origins: origins.collect::<Result<_, _>>()?, hosts: hosts.collect::<Result<_, _>>()? })
    }

    /// Whether there are names that the machine may be asked for by.
    pub fn has_hosts(&self) -> bool {
        !self.hosts.is_empty()
    }

    /// Whether pages of an origin may ask.
    pub(crate) fn has_origin(&self, origin: &str) -> bool {
        self.origins.iter().any(|known| known.eq_ignore_ascii_case(origin))
    }

    /// Whether a host, with a port or without, is this machine by a name that nobody else can have, or by one that was allowed.
    pub(crate) fn has_host(&self, host: &str) -> bool {
        let name = name_of(host);
        let is_allowed = || self.hosts.iter().any(|known| name_of(known).eq_ignore_ascii_case(name));
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok() || is_allowed()
    }
}

/// A host without its port, and an address without its brackets.
fn name_of(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((inner, _)) => inner,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

/// An origin as browsers send it, who leave out the usual port.
fn plain_origin(origin: &str) -> Option<String> {
    let (scheme, host) = origin.split_once("://")?;
    let usual = match &*scheme.to_ascii_lowercase() {
        "http" => ":80",
        "https" => ":443",
        _ => "",
    };
    let host = host.strip_suffix(usual).unwrap_or(host);
    let (name, port) = match host.rsplit_once(':') {
        // What is behind a colon within brackets is no port.
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (host, None),
    };
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    let is_origin = is_scheme(scheme) && (is_name(name) || is_address(name)) && port.is_none_or(is_port);
    is_origin.then(|| format!("{scheme}://{host}"))
}

fn is_scheme(scheme: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    scheme.bytes().all(plain) && scheme.starts_with(|letter: char| letter.is_ascii_alphabetic())
}

fn is_name(host: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    !host.is_empty() && host.bytes().all(plain)
}

/// An address of the kind that stands in brackets.
fn is_address(host: &str) -> bool {
    let inner = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    inner.is_some_and(|inner| inner.parse::<Ipv6Addr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowing(origin: &str, host: &str) -> Result<Neighbours, ServerError> {
        Neighbours::new([origin.to_owned()], [host.to_owned()])
    }

    #[test]
    fn only_names_that_nobody_can_take_are_this_machine() {
        let nobody = Neighbours::default();
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1:8080", "[::1]:80", "192.168.0.1", "[::1]"] {
            assert!(nobody.has_host(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", ":80"] {
            assert!(!nobody.has_host(host), "{host}");
        }
    }

    #[test]
    fn a_name_that_is_allowed_is_this_machine_and_no_other_is() {
        let neighbours = allowing("https://app.example", "Models.example").unwrap();
        for host in ["models.example", "MODELS.EXAMPLE:8080", "localhost:80", "127.0.0.1"] {
            assert!(neighbours.has_host(host), "{host}");
        }
        for host in ["evil.models.example", "models.example.evil", "app.example", "", ":80"] {
            assert!(!neighbours.has_host(host), "{host}");
        }
    }

    #[test]
    fn an_origin_is_the_whole_of_it() {
        for (given, sent) in [
            ("https://app.example", "https://app.example"),
            ("HTTPS://App.Example:443", "https://app.example"),
            ("http://localhost:3000", "http://localhost:3000"),
            ("http://a:80", "http://a"),
            ("http://[::1]:8080", "http://[::1]:8080"),
            ("http://[::80]", "http://[::80]"),
            ("tauri://localhost", "tauri://localhost"),
            ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ] {
            let neighbours = allowing(given, "a").unwrap();
            assert!(neighbours.has_origin(sent), "{given}: {neighbours:?}");
            for other in ["null", "", "https://app.example:444", "https://evil.example", "http://app.example"]
            {
                assert!(!neighbours.has_origin(other), "{given}: {other}");
            }
        }
        assert!(!Neighbours::default().has_origin(""));
    }

    #[test]
    fn what_no_browser_sends_is_refused_by_its_name() {
        for origin in [
            "",
            "*",
            "null",
            "app.example",
            "https://",
            "https://app.example/",
            "https://app.example/path",
            "://a",
            "https://a b",
            "https://user@a",
            "https://a:b",
            "https://a:",
            "https://a:+1",
            "https://a:70000",
            "1a://a",
            "https://[::1",
            "https://[a]",
            "https://é.example",
            "https://a,https://b",
        ] {
            let error = allowing(origin, "a").unwrap_err().to_string();
            assert!(
                error.contains(&format!("{origin:?}")) && error.contains("https://app.example"),
                "{error}"
            );
        }
        for host in ["", "*", "https://a", "a:80", "a/b", "a b", "[a]", "ä.example"] {
            let error = allowing("http://a", host).unwrap_err().to_string();
            assert!(error.contains(&format!("{host:?}")) && error.contains("models.example"), "{error}");
        }
    }
}
