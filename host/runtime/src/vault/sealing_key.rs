//! The keys that secrets are sealed with, and where they come from.

use crate::RuntimeError;
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    hmac,
    rand::{SecureRandom, SystemRandom},
};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tokio::{io::AsyncReadExt as _, process::Command};

const KEY_BYTES: usize = 32;
/// Maximum number of keys: the one that seals, and earlier ones that still open.
const MAX_KEYS: usize = 8;
/// Time limit and maximum output of a command that prints keys.
const COMMAND_TIME: Duration = Duration::from_secs(30);
const COMMAND_BYTES: u64 = 4_096;

type KeyBytes = [u8; KEY_BYTES];

/// The place of the keys that seal secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SealingKey {
    /// In memory: a key lives as long as the process, as an in-memory store does.
    #[default]
    InMemory,
    /// In a file, which is created when the first secret is set. Each 32 bytes are a key: the first seals, and the others
    /// open what was sealed with them.
    File(PathBuf),
    /// Printed by a program, one key of 64 hexadecimal digits on each line. The first seals.
    Command(Vec<String>),
}

impl fmt::Display for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SealingKey::InMemory => f.write_str("in memory"),
            SealingKey::File(path) => path.display().fmt(f),
            SealingKey::Command(words) => write!(f, "the output of {}", words.join(" ")),
        }
    }
}

/// The first of these keys seals. All of them open.
pub(super) struct Keys {
    ciphers: Vec<LessSafeKey>,
}

impl Keys {
    pub(super) fn new(keys: &[KeyBytes]) -> Self {
        let cipher = |key: &KeyBytes| {
            LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("the key has the cipher's length"))
        };
        Keys { ciphers: keys.iter().map(cipher).collect() }
    }

    /// Encrypts a value. The result is a fresh nonce, followed by the ciphertext with its tag.
    pub(super) fn seal(&self, bound_to: Vec<u8>, value: &str) -> Result<Vec<u8>, RuntimeError> {
        let nonce: [u8; NONCE_LEN] = random()?;
        let mut sealed = value.as_bytes().to_vec();
        let key = self.ciphers.first().expect("there is a key");
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(bound_to), &mut sealed)
            .map_err(|_| super::internal("a secret cannot be sealed".to_owned()))?;
        Ok([nonce.as_slice(), &sealed].concat())
    }

    pub(super) fn open(&self, bound_to: &[u8], sealed: &[u8]) -> Option<String> {
        let (nonce, sealed) = sealed.split_first_chunk::<NONCE_LEN>()?;
        self.ciphers.iter().find_map(|key| {
            let mut opened = sealed.to_vec();
            let nonce = Nonce::assume_unique_for_key(*nonce);
            let opened = key.open_in_place(nonce, Aad::from(bound_to), &mut opened).ok()?;
            String::from_utf8(opened.to_vec()).ok()
        })
    }
}

impl SealingKey {
    /// Reads the keys; `None` if there are none yet.
    pub(super) async fn read(&self) -> Result<Option<Vec<KeyBytes>>, RuntimeError> {
        let read = match self {
            SealingKey::InMemory => return Ok(None),
            SealingKey::File(path) => {
                let path = path.clone();
                on_disk(move || read_file(&path)).await
            }
            SealingKey::Command(words) => printed_by(words).await.map(Some),
        };
        read.map_err(|error| self.failed(error))
    }

    /// Returns a key for another purpose, derived from the key that seals; `None` if there is none yet. With another sealing
    /// key, it is another one.
    pub async fn derived(&self, purpose: &str) -> Result<Option<[u8; KEY_BYTES]>, RuntimeError> {
        let Some(keys) = self.read().await? else { return Ok(None) };
        let derive = |key: &KeyBytes| {
            let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), purpose.as_bytes());
            let bytes: &[u8] = tag.as_ref();
            std::array::from_fn(|at| bytes[at])
        };
        Ok(keys.first().map(derive))
    }

    /// Writes a key to the file, which must not exist.
    pub(super) async fn create(&self, key: KeyBytes) -> Result<(), RuntimeError> {
        let SealingKey::File(path) = self else { return Ok(()) };
        let path = path.clone();
        on_disk(move || write_new(&path, &[key])).await.map_err(|error| self.failed(error))
    }

    /// Replaces the keys in the file, at once.
    pub(super) async fn replace(&self, keys: Vec<KeyBytes>) -> Result<(), RuntimeError> {
        let SealingKey::File(path) = self else { return Ok(()) };
        if keys.len() > MAX_KEYS {
            return Err(self.failed(io::Error::other(format!("it can have at most {MAX_KEYS} keys"))));
        }
        let path = path.clone();
        on_disk(move || replace_file(&path, &keys)).await.map_err(|error| self.failed(error))
    }

    fn failed(&self, error: io::Error) -> RuntimeError {
        super::internal(format!("the key for secrets, {self}: {error}"))
    }
}

async fn on_disk<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// Reads the keys, if the file exists. Fails if anyone but its owner may read the file.
fn read_file(path: &Path) -> io::Result<Option<Vec<KeyBytes>>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    #[cfg(unix)]
    {
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(path)?.permissions());
        if mode & 0o077 != 0 {
            return Err(io::Error::other(
                "other users may read it; restrict it to its owner with `chmod 600`",
            ));
        }
    }
    let (keys, rest) = bytes.as_chunks::<KEY_BYTES>();
    if keys.is_empty() || !rest.is_empty() || keys.len() > MAX_KEYS {
        return Err(io::Error::other(format!(
            "it has {} bytes, and not {KEY_BYTES} for each of 1 to {MAX_KEYS} keys",
            bytes.len()
        )));
    }
    Ok(Some(keys.to_vec()))
}

/// Writes keys to a new file. Fails if the file exists.
fn write_new(path: &Path, keys: &[KeyBytes]) -> io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    io::Write::write_all(&mut file, keys.as_flattened())?;
    file.sync_all()
}

fn replace_file(path: &Path, keys: &[KeyBytes]) -> io::Result<()> {
    let new = path.with_extension("new");
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    write_new(&new, keys)?;
    std::fs::rename(&new, path)?;
    #[cfg(unix)]
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::File::open(folder)?.sync_all()?;
    }
    Ok(())
}

/// Runs a program and reads the keys that it prints.
async fn printed_by(words: &[String]) -> io::Result<Vec<KeyBytes>> {
    let (program, arguments) = words.split_first().ok_or_else(|| io::Error::other("no program is named"))?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut output = Vec::new();
    let run = async {
        let mut stdout = child.stdout.take().expect("the output is a pipe").take(COMMAND_BYTES);
        stdout.read_to_end(&mut output).await?;
        drop(stdout);
        child.wait().await
    };
    let ended = tokio::time::timeout(COMMAND_TIME, run).await;
    let ended = ended
        .map_err(|_| io::Error::other(format!("it did not end within {} s", COMMAND_TIME.as_secs())))??;
    if !ended.success() {
        return Err(io::Error::other(format!("it failed with {ended}; its own messages are in the log")));
    }
    let malformed = || {
        io::Error::other(format!(
            "it must print 1 to {MAX_KEYS} lines of {} hexadecimal digits",
            2 * KEY_BYTES
        ))
    };
    let text = str::from_utf8(&output).map_err(|_| malformed())?;
    let keys: Vec<KeyBytes> = text.lines().map(from_hex).collect::<Option<_>>().ok_or_else(malformed)?;
    if (1..=MAX_KEYS).contains(&keys.len()) { Ok(keys) } else { Err(malformed()) }
}

fn from_hex(line: &str) -> Option<KeyBytes> {
    let line = line.trim().as_bytes();
    if line.len() != 2 * KEY_BYTES || !line.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut key = [0; KEY_BYTES];
    for (byte, digits) in key.iter_mut().zip(line.chunks_exact(2)) {
        *byte = u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(key)
}

/// Returns random bytes.
pub(super) fn random<const BYTES: usize>() -> Result<[u8; BYTES], RuntimeError> {
    let mut bytes = [0; BYTES];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| super::internal("the system provides no random numbers".to_owned()))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_prints_the_keys() {
        let key = "0123456789abcdefABCDEF0000000000000000000000000000000000000000ff";
        let printing = |script: &str| SealingKey::Command(["sh", "-c", script].map(str::to_owned).to_vec());
        let keys = printing(&format!("echo {key}; echo {key}")).read().await.unwrap().unwrap();
        assert_eq!((keys.len(), keys[0][..3].to_vec(), keys[0][31]), (2, vec![1, 0x23, 0x45], 0xff));
        for (script, expected) in [
            ("echo 12", "64 hexadecimal digits"),
            ("true", "64 hexadecimal digits"),
            ("exit 3", "exit status: 3"),
            (&*format!("for n in 1 2 3 4 5 6 7 8 9; do echo {key}; done"), "1 to 8 lines"),
        ] {
            let error = printing(script).read().await.unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("the output of sh"), "{error}");
        }
        let none = SealingKey::Command(vec!["/no/such/program".into()]).read().await.unwrap_err();
        assert!(none.to_string().contains("/no/such/program"), "{none}");
    }

    #[tokio::test]
    async fn a_file_has_one_key_or_several() {
        let folder = tempfile::tempdir().unwrap();
        let place = SealingKey::File(folder.path().join("secrets.key"));
        assert_eq!(place.read().await.unwrap(), None);
        place.create([1; KEY_BYTES]).await.unwrap();
        place.create([2; KEY_BYTES]).await.expect_err("the file exists");
        place.replace(vec![[2; KEY_BYTES], [1; KEY_BYTES]]).await.unwrap();
        assert_eq!(place.read().await.unwrap().unwrap(), [[2; KEY_BYTES], [1; KEY_BYTES]]);
        place.replace(vec![[3; KEY_BYTES]; MAX_KEYS + 1]).await.expect_err("too many");
        let derived = place.derived("pages").await.unwrap().expect("there is a key");
        assert_ne!(derived, [2; KEY_BYTES]);
        assert_ne!(place.derived("others").await.unwrap(), Some(derived));
        place.replace(vec![[1; KEY_BYTES]]).await.unwrap();
        assert_ne!(place.derived("pages").await.unwrap(), Some(derived));
        assert_eq!(SealingKey::InMemory.derived("pages").await.unwrap(), None);
        std::fs::write(folder.path().join("secrets.key"), [3; 33]).unwrap();
        let error = place.read().await.unwrap_err().to_string();
        assert!(error.contains("33 bytes"), "{error}");
    }
}
