//! The origins and host names that browsers may use to call the server.

use std::net::{IpAddr, Ipv6Addr};

use crate::error::ServerError;

/// Origins and host names that a browser may use beside the server's own address. Empty by default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedOrigins {
    origins: Vec<String>,
    hosts: Vec<String>,
}

impl AllowedOrigins {
    /// Allows pages of these origins, such as `https://app.example`, and requests to these host names, such as
    /// `models.example`.
    pub fn new(
        origins: impl IntoIterator<Item = String>,
        hosts: impl IntoIterator<Item = String>,
    ) -> Result<Self, ServerError> {
        let origins = origins.into_iter().map(|origin| {
            let plain = plain_origin(&origin);
            plain.ok_or(ServerError::Origin { origin })
        });
        let hosts = hosts.into_iter().map(|host| {
            // An IP address already names this machine; listing one is harmless.
            if is_name(&host) || is_address(&host) { Ok(host) } else { Err(ServerError::Host { host }) }
        });
        Ok(Self { origins: origins.collect::<Result<_, _>>()?, hosts: hosts.collect::<Result<_, _>>()? })
    }

    /// Returns true if extra host names are allowed.
    pub fn has_hosts(&self) -> bool {
        !self.hosts.is_empty()
    }

    /// Returns true if pages of `origin` may call the server.
    pub(crate) fn has_origin(&self, origin: &str) -> bool {
        self.origins.iter().any(|known| known.eq_ignore_ascii_case(origin))
    }

    /// Returns true if `host`, with or without a port, names this machine: `localhost`, an IP address, or an
    /// allowed name. No other site can claim the first two.
    pub(crate) fn has_host(&self, host: &str) -> bool {
        let name = name_of(host);
        let is_allowed = || self.hosts.iter().any(|known| name_of(known).eq_ignore_ascii_case(name));
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok() || is_allowed()
    }
}

/// Strips the port from a host, and the brackets from an IPv6 address.
fn name_of(host: &str) -> &str {
    match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((inner, _)) => inner,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

/// Normalizes an origin to the form browsers send, which omits the scheme's default port.
fn plain_origin(origin: &str) -> Option<String> {
    let (scheme, host) = origin.split_once("://")?;
    let usual = match &*scheme.to_ascii_lowercase() {
        "http" => ":80",
        "https" => ":443",
        _ => "",
    };
    let host = host.strip_suffix(usual).unwrap_or(host);
    let (name, port) = match host.rsplit_once(':') {
        // A colon inside brackets belongs to the address.
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

/// Returns true for a bracketed IPv6 address.
fn is_address(host: &str) -> bool {
    let inner = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    inner.is_some_and(|inner| inner.parse::<Ipv6Addr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowing(origin: &str, host: &str) -> Result<AllowedOrigins, ServerError> {
        AllowedOrigins::new([origin.to_owned()], [host.to_owned()])
    }

    #[test]
    fn only_localhost_and_addresses_are_local_by_default() {
        let defaults = AllowedOrigins::default();
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1:8080", "[::1]:80", "192.168.0.1", "[::1]"] {
            assert!(defaults.has_host(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", ":80"] {
            assert!(!defaults.has_host(host), "{host}");
        }
    }

    #[test]
    fn an_allowed_host_is_accepted_and_no_other() {
        let allowed_origins = allowing("https://app.example", "Models.example").unwrap();
        for host in ["models.example", "MODELS.EXAMPLE:8080", "localhost:80", "127.0.0.1"] {
            assert!(allowed_origins.has_host(host), "{host}");
        }
        for host in ["evil.models.example", "models.example.evil", "app.example", "", ":80"] {
            assert!(!allowed_origins.has_host(host), "{host}");
        }
    }

    #[test]
    fn origins_match_by_scheme_host_and_port() {
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
            let allowed_origins = allowing(given, "a").unwrap();
            assert!(allowed_origins.has_origin(sent), "{given}: {allowed_origins:?}");
            for other in ["null", "", "https://app.example:444", "https://evil.example", "http://app.example"]
            {
                assert!(!allowed_origins.has_origin(other), "{given}: {other}");
            }
        }
        assert!(!AllowedOrigins::default().has_origin(""));
    }

    #[test]
    fn malformed_origins_and_hosts_are_rejected() {
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
