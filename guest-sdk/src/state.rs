//! The session's durable state: small JSON values under string keys.
//!
//! Reads see the turn's own writes. The writes are committed when the turn succeeds, and dropped when it
//! fails.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::StateError;
use crate::host::Host;

/// Number of keys requested from the host at a time.
const KEYS_PER_CALL: u32 = 256;

/// The session's durable state. See [`Context::state`](crate::Context::state).
#[derive(Clone, Copy)]
pub struct State<'a> {
    pub(crate) host: &'a dyn Host,
}

impl State<'_> {
    /// Returns the value under `key`, or `None` if there is none. A value that is not a `T` is an error, not
    /// a `None`.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, StateError> {
        match self.host.state_get(key) {
            Some(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| json_error(key, &error)),
            None => Ok(None),
        }
    }

    /// Does the same as [`get`](Self::get), but returns `T::default()` if there is no value.
    pub fn get_or_default<T: DeserializeOwned + Default>(&self, key: &str) -> Result<T, StateError> {
        Ok(self.get(key)?.unwrap_or_default())
    }

    /// Writes `value` under `key`.
    pub fn set<T: Serialize + ?Sized>(&self, key: &str, value: &T) -> Result<(), StateError> {
        self.host.state_set(key, &to_json(key, value)?)
    }

    /// Deletes `key`. Returns whether it existed.
    pub fn delete(&self, key: &str) -> bool {
        self.host.state_delete(key)
    }

    /// Returns all keys that begin with `prefix`, in order.
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        let mut keys: Vec<String> = Vec::new();
        loop {
            let more = self.host.state_keys(prefix, keys.last().map(String::as_str), KEYS_PER_CALL);
            let is_last = more.len() < KEYS_PER_CALL as usize;
            keys.extend(more);
            if is_last {
                return keys;
            }
        }
    }

    /// Returns a page of values with their keys, ordered by key: at most `limit` of the keys that begin with
    /// `prefix` and come after `after`. A value that is not a `T` is an error.
    ///
    /// ```
    /// # use skep_sdk::{Context, StateError};
    /// fn total(cx: &Context) -> Result<u64, StateError> {
    ///     let (mut total, mut last) = (0, None::<String>);
    ///     loop {
    ///         let page = cx.state().list::<u64>("price/", last.as_deref(), 100)?;
    ///         total += page.iter().map(|(_, price)| price).sum::<u64>();
    ///         match page.into_iter().next_back() {
    ///             Some((key, _)) => last = Some(key),
    ///             None => return Ok(total),
    ///         }
    ///     }
    /// }
    /// ```
    pub fn list<T: DeserializeOwned>(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<(String, T)>, StateError> {
        let mut page = Vec::new();
        for key in self.host.state_keys(prefix, after, limit) {
            if let Some(value) = self.get(&key)? {
                page.push((key, value));
            }
        }
        Ok(page)
    }

    /// Writes `value` only if the current value is `expected` (`None` means absent), byte for byte as JSON.
    /// Returns whether it was written.
    pub fn compare_and_set<T: Serialize + ?Sized>(
        &self,
        key: &str,
        expected: Option<&T>,
        value: &T,
    ) -> Result<bool, StateError> {
        let expected = expected.map(|value| to_json(key, value)).transpose()?;
        self.host.state_compare_and_set(key, expected.as_deref(), &to_json(key, value)?)
    }
}

fn to_json<T: Serialize + ?Sized>(key: &str, value: &T) -> Result<Vec<u8>, StateError> {
    serde_json::to_vec(value).map_err(|error| json_error(key, &error))
}

fn json_error(key: &str, error: &serde_json::Error) -> StateError {
    StateError::Json { key: key.to_owned(), message: error.to_string() }
}
