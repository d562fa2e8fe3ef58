//! The key that the hosts of a cluster share, and the signatures that they make with it.
//!
//! A request between hosts is signed over its method, path, time, nonce, receiver, body and the client that it is for.
//! The receiver accepts it once, within [`WINDOW`], and proves with its answer that it has the key, too. So neither side
//! talks to a stranger, and nothing that was recorded can be sent again, to this host or to another one.
//!
//! The body of a client's request that is passed on as a stream is not signed: it is not known when the head is sent. It
//! carries the client's own key, in plain text like on its way to the cluster, and needs that key to have an effect.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use ring::{digest, hmac};
use skep_runtime::CLUSTER_PROTOCOL;
use std::{fmt, sync::Arc, time::Duration};

/// Prefix of the headers that belong to the hosts. Those that a client sends are removed.
const PREFIX: &str = "x-skep-cluster-";
const TIME: HeaderName = HeaderName::from_static("x-skep-cluster-time");
const NONCE: HeaderName = HeaderName::from_static("x-skep-cluster-nonce");
const RECEIVER: HeaderName = HeaderName::from_static("x-skep-cluster-receiver");
const BODY: HeaderName = HeaderName::from_static("x-skep-cluster-body");
/// The version of the protocol that the sender speaks. It is not signed, because hosts of the first version do not send it.
/// Anybody in the network who changes it only makes the request fail, as dropping the request would.
const PROTOCOL: HeaderName = HeaderName::from_static("x-skep-cluster-protocol");
/// Says that the client needs a key, because the host that it talks to requires one. It is not signed, because earlier hosts do not know
/// it. A host that others can reach over the network requires keys by itself.
const NEEDS_KEY: HeaderName = HeaderName::from_static("x-skep-cluster-needs-key");
const SIGNATURE: HeaderName = HeaderName::from_static("x-skep-cluster-signature");
const PROOF: HeaderName = HeaderName::from_static("x-skep-cluster-proof");
/// The client that a request is for.
pub(super) const CLIENT: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Maximum difference between the time of a signature and the time of the receiver.
pub(super) const WINDOW: Duration = Duration::from_secs(30);
/// Minimum length of a key.
const MIN_BYTES: usize = 32;
const MAX_BYTES: usize = 4096;
/// The first lines of what is signed: a signature of one kind is never one of the other.
const REQUEST: &str = "skep cluster request 1";
const ANSWER: &str = "skep cluster answer 1";
const DERIVED: &str = "skep cluster derived 1";
/// Value of [`BODY`] for a body that is not signed.
const STREAMED: &str = "streamed";

/// The secret that all hosts of a cluster have.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKey(Arc<[u8]>);

/// The body of a request in its signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SignedBody {
    /// The body's SHA-256.
    Digest([u8; 32]),
    /// The body is not signed.
    Streamed,
}

/// The number of one request between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Nonce(pub(super) u128);

/// A request whose signature was made with the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Signed {
    pub(super) nonce: Nonce,
    pub(super) receiver: i64,
    pub(super) time_ms: u64,
    pub(super) body: SignedBody,
}

/// Why a signature is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Malformed,
    OtherKey,
}

impl ClusterKey {
    /// Takes the content of a key file: everything but white space at both ends. Fails if that is too short to be a
    /// secret.
    pub fn new(secret: &[u8]) -> Result<Self, String> {
        let secret = secret.trim_ascii();
        match secret.len() {
            MIN_BYTES..=MAX_BYTES => Ok(ClusterKey(secret.into())),
            bytes => Err(format!(
                "a cluster's key must have {MIN_BYTES} to {MAX_BYTES} bytes, and this one has {bytes}; make one with \
                 `openssl rand -hex 32`"
            )),
        }
    }

    /// Signs a request to a host, whose client is already in its headers. `path` is the path with the query.
    pub(super) fn sign(&self, method: &Method, path: &str, headers: &mut HeaderMap, signed: &Signed) {
        let Signed { nonce, receiver, time_ms, body } = signed;
        headers.insert(TIME, HeaderValue::from(*time_ms));
        headers.insert(NONCE, text(nonce.to_string()));
        headers.insert(RECEIVER, HeaderValue::from(*receiver));
        headers.insert(BODY, text(body.to_string()));
        let mac = hmac::sign(&self.mac_key(), request_text(method, path, headers, signed).as_bytes());
        headers.insert(SIGNATURE, text(STANDARD.encode(mac)));
    }

    /// Checks the signature of a request. Returns `None` if it has none. Whether the signature is for this host, is recent
    /// and was not used before is for the caller to check.
    pub(super) fn verify(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Option<Signed>, Fault> {
        if !headers.contains_key(SIGNATURE) {
            return Ok(None);
        }
        let signed = read(headers).ok_or(Fault::Malformed)?;
        let signature = one(headers, SIGNATURE).and_then(|value| STANDARD.decode(value).ok());
        let signature = signature.ok_or(Fault::Malformed)?;
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let text = request_text(method, path, headers, &signed);
        // The comparison takes the same time whatever differs.
        hmac::verify(&self.mac_key(), text.as_bytes(), &signature).map_err(|_| Fault::OtherKey)?;
        Ok(Some(signed))
    }

    /// Adds the proof that this host has the key to an answer.
    pub(super) fn prove(&self, nonce: Nonce, status: StatusCode, headers: &mut HeaderMap) {
        let mac = hmac::sign(&self.mac_key(), answer_text(nonce, status).as_bytes());
        headers.insert(PROOF, text(STANDARD.encode(mac)));
    }

    /// Removes the proof from an answer, and returns whether it is right.
    pub(super) fn is_proven(&self, nonce: Nonce, status: StatusCode, headers: &mut HeaderMap) -> bool {
        let proof = headers.remove(PROOF).and_then(|proof| STANDARD.decode(proof.as_bytes()).ok());
        let text = answer_text(nonce, status);
        proof.is_some_and(|proof| hmac::verify(&self.mac_key(), text.as_bytes(), &proof).is_ok())
    }

    /// Returns a key for another purpose, which all hosts with this key have.
    pub fn derived(&self, purpose: &str) -> [u8; 32] {
        let mac = hmac::sign(&self.mac_key(), format!("{DERIVED}\n{purpose}\n").as_bytes());
        mac.as_ref().try_into().expect("HMAC-SHA256 has 32 bytes")
    }

    fn mac_key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.0)
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey")
    }
}

impl Nonce {
    /// Returns a number that no other request has.
    pub(super) fn new() -> Self {
        Nonce(uuid::Uuid::now_v7().as_u128())
    }
}

impl fmt::Display for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl SignedBody {
    /// Returns the digest of a whole body.
    pub(super) fn of(body: &[u8]) -> Self {
        let digest = digest::digest(&digest::SHA256, body);
        SignedBody::Digest(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }

    fn parse(text: &str) -> Option<Self> {
        if text == STREAMED {
            return Some(SignedBody::Streamed);
        }
        STANDARD.decode(text).ok()?.try_into().ok().map(SignedBody::Digest)
    }
}

impl fmt::Display for SignedBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SignedBody::Digest(digest) => f.write_str(&STANDARD.encode(digest)),
            SignedBody::Streamed => f.write_str(STREAMED),
        }
    }
}

impl Fault {
    pub(super) fn message(self) -> &'static str {
        match self {
            Fault::Malformed => {
                "the signature of the request is malformed; do the hosts have the same version?"
            }
            Fault::OtherKey => {
                "the request was signed with another key, or was changed on its way; give all hosts the same key: key_file \
                 under [cluster], or SKEP_CLUSTER_KEY"
            }
        }
    }
}

/// Says which version of the protocol between hosts this one speaks.
pub(super) fn say_protocol(headers: &mut HeaderMap) {
    headers.insert(PROTOCOL, HeaderValue::from(CLUSTER_PROTOCOL));
}

/// Returns the version of the protocol that the sender of a request speaks. A host that says nothing speaks the first one.
pub(super) fn protocol(headers: &HeaderMap) -> i64 {
    const FIRST: i64 = 1;
    let said = headers.get(PROTOCOL).and_then(|said| said.to_str().ok());
    said.map_or(FIRST, |said| said.parse().unwrap_or(i64::MAX))
}

/// Says that the client of a request needs a key.
pub(super) fn say_needs_key(headers: &mut HeaderMap) {
    headers.insert(NEEDS_KEY, HeaderValue::from_static("1"));
}

/// Returns whether the sender of a request says that its client needs a key.
pub(super) fn needs_key(headers: &HeaderMap) -> bool {
    headers.contains_key(NEEDS_KEY)
}

/// Removes the headers that only hosts send.
pub(super) fn strip(headers: &mut HeaderMap) {
    let own: Vec<HeaderName> = headers.keys().filter(|name| is_own(name)).cloned().collect();
    for name in own {
        headers.remove(name);
    }
}

/// Returns whether a header belongs to the hosts.
fn is_own(name: &HeaderName) -> bool {
    name.as_str().starts_with(PREFIX)
}

fn read(headers: &HeaderMap) -> Option<Signed> {
    let nonce = one(headers, NONCE).filter(|nonce| nonce.len() == 32)?;
    // A client may send several of these headers, or one that is not text; a host does not.
    if headers.contains_key(CLIENT) && one(headers, CLIENT).is_none() {
        return None;
    }
    Some(Signed {
        nonce: Nonce(u128::from_str_radix(nonce, 16).ok()?),
        receiver: one(headers, RECEIVER)?.parse().ok()?,
        time_ms: one(headers, TIME)?.parse().ok()?,
        body: SignedBody::parse(one(headers, BODY)?)?,
    })
}

/// Returns the value of a header that is given once.
fn one(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

/// Returns what the signature of a request covers. No part can contain a line break.
fn request_text(method: &Method, path: &str, headers: &HeaderMap, signed: &Signed) -> String {
    let Signed { nonce, receiver, time_ms, body } = signed;
    let client = one(headers, CLIENT).unwrap_or_default();
    format!("{REQUEST}\n{method}\n{path}\n{time_ms}\n{nonce}\n{receiver}\n{body}\n{client}\n")
}

fn answer_text(nonce: Nonce, status: StatusCode) -> String {
    format!("{ANSWER}\n{nonce}\n{}\n", status.as_u16())
}

fn text(value: String) -> HeaderValue {
    HeaderValue::try_from(value).expect("digits and base64 are a valid header value")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(letter: u8) -> ClusterKey {
        ClusterKey::new(&[letter; MIN_BYTES]).unwrap()
    }

    fn request() -> Signed {
        Signed { nonce: Nonce(7), receiver: 3, time_ms: 1_000, body: SignedBody::of(b"body") }
    }

    fn signed_headers(path: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(CLIENT, HeaderValue::from_static("192.0.2.1"));
        key(b'k').sign(&Method::POST, path, &mut headers, &request());
        headers
    }

    #[test]
    fn a_key_is_trimmed_and_long_enough() {
        let long = format!("  {}\n", "k".repeat(MIN_BYTES));
        assert_eq!(ClusterKey::new(long.as_bytes()).unwrap(), key(b'k'));
        for wrong in ["", "  \n", &"k".repeat(MIN_BYTES - 1), &"k".repeat(MAX_BYTES + 1)] {
            let error = ClusterKey::new(wrong.as_bytes()).unwrap_err();
            assert!(error.contains("32 to 4096 bytes") && error.contains("openssl rand"), "{error}");
        }
        assert!(!format!("{:?}", key(b'k')).contains("kk"));
    }

    #[test]
    fn a_derived_key_depends_on_the_key_and_on_its_purpose() {
        let derived = key(b'k').derived("one");
        assert_eq!(key(b'k').derived("one"), derived);
        assert_ne!(key(b'k').derived("two"), derived);
        assert_ne!(key(b'o').derived("one"), derived);
    }

    #[test]
    fn a_signature_is_verified_with_the_key() {
        let headers = signed_headers("/a?b=c");
        let uri: Uri = "/a?b=c".parse().unwrap();
        assert_eq!(key(b'k').verify(&Method::POST, &uri, &headers), Ok(Some(request())));
        assert_eq!(key(b'o').verify(&Method::POST, &uri, &headers), Err(Fault::OtherKey));
        assert_eq!(key(b'k').verify(&Method::POST, &uri, &HeaderMap::new()), Ok(None));
    }

    #[test]
    fn whatever_is_changed_breaks_the_signature() {
        let uri: Uri = "/a?b=c".parse().unwrap();
        let check = |method: &Method, uri: &str, change: &dyn Fn(&mut HeaderMap)| {
            let mut headers = signed_headers("/a?b=c");
            change(&mut headers);
            key(b'k').verify(method, &uri.parse().unwrap(), &headers)
        };
        let set = |name: HeaderName, value: &'static str| {
            move |headers: &mut HeaderMap| {
                headers.insert(name.clone(), HeaderValue::from_static(value));
            }
        };
        let nothing = |_: &mut HeaderMap| {};
        assert!(check(&Method::POST, &uri.to_string(), &nothing).is_ok());
        assert_eq!(check(&Method::PUT, "/a?b=c", &nothing), Err(Fault::OtherKey));
        assert_eq!(check(&Method::POST, "/a?b=d", &nothing), Err(Fault::OtherKey));
        assert_eq!(check(&Method::POST, "/b?b=c", &nothing), Err(Fault::OtherKey));
        for change in [
            set(TIME, "1001"),
            set(NONCE, "00000000000000000000000000000008"),
            set(RECEIVER, "4"),
            set(BODY, STREAMED),
            set(CLIENT, "192.0.2.2"),
        ] {
            assert_eq!(check(&Method::POST, "/a?b=c", &change), Err(Fault::OtherKey));
        }
        let remove = |headers: &mut HeaderMap| drop(headers.remove(CLIENT));
        assert_eq!(check(&Method::POST, "/a?b=c", &remove), Err(Fault::OtherKey));
    }

    #[test]
    fn a_header_that_is_missing_doubled_or_no_value_is_malformed() {
        let uri: Uri = "/a".parse().unwrap();
        let check = |change: &dyn Fn(&mut HeaderMap)| {
            let mut headers = signed_headers("/a");
            change(&mut headers);
            key(b'k').verify(&Method::POST, &uri, &headers)
        };
        for name in [TIME, NONCE, RECEIVER, BODY, SIGNATURE, CLIENT] {
            let double = |headers: &mut HeaderMap| {
                headers.append(name.clone(), HeaderValue::from_static("1"));
            };
            assert_eq!(check(&double), Err(Fault::Malformed), "{name} twice");
            if name != SIGNATURE && name != CLIENT {
                assert_eq!(
                    check(&|headers: &mut HeaderMap| drop(headers.remove(&name))),
                    Err(Fault::Malformed),
                    "without {name}"
                );
            }
            if name != CLIENT {
                let garble = |headers: &mut HeaderMap| {
                    headers.insert(name.clone(), HeaderValue::from_static("?"));
                };
                assert_eq!(check(&garble), Err(Fault::Malformed), "{name}");
            }
        }
    }

    #[test]
    fn an_answer_proves_the_key_for_one_request_and_status() {
        let mut headers = HeaderMap::new();
        key(b'k').prove(Nonce(7), StatusCode::OK, &mut headers);
        let is_proven = |key: &ClusterKey, nonce, status| {
            let mut headers = headers.clone();
            let is_proven = key.is_proven(Nonce(nonce), status, &mut headers);
            assert!(headers.is_empty(), "a client never sees the proof");
            is_proven
        };
        assert!(is_proven(&key(b'k'), 7, StatusCode::OK));
        assert!(!is_proven(&key(b'k'), 8, StatusCode::OK));
        assert!(!is_proven(&key(b'k'), 7, StatusCode::CREATED));
        assert!(!is_proven(&key(b'o'), 7, StatusCode::OK));
        assert!(!key(b'k').is_proven(Nonce(7), StatusCode::OK, &mut HeaderMap::new()));
    }

    #[test]
    fn headers_of_hosts_are_removed_from_other_requests() {
        let mut headers = signed_headers("/a");
        headers.insert("x-skep-cluster-new", HeaderValue::from_static("1"));
        headers.insert("x-skep-model", HeaderValue::from_static("m"));
        strip(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["x-forwarded-for", "x-skep-model"]);
    }
}
