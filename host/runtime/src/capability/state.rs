//! `skep:agent/state`: small durable values of the session.
//!
//! A turn sees the committed state overlaid with its own writes. The writes are committed with the turn; a failed turn
//! leaves no trace.

use crate::{
    Limits, RuntimeError,
    bindings::state::{Host, StateError},
    capability::TurnContext,
};
use skep_store::StateChange;
use std::{collections::BTreeMap, ops::Bound, sync::Arc};

const MAX_KEY_BYTES: usize = 256;
/// Maximum size of one value. Larger data is a file and belongs elsewhere.
const MAX_VALUE_BYTES: usize = 256 << 10;
const MAX_KEYS_LISTED: u32 = 10_000;
/// Maximum number of keys that a turn changes. They are written in one transaction, which delays other commits.
const MAX_KEYS_CHANGED: usize = 30_000;

/// Committed values of a session, by key.
pub(crate) type State = BTreeMap<String, Vec<u8>>;

/// Returns the size of all keys and values.
pub(crate) fn state_bytes(state: &State) -> usize {
    state.iter().map(|(key, value)| key.len() + value.len()).sum()
}

/// The state as one turn sees it.
#[derive(Debug)]
pub(crate) struct StateView {
    committed: Arc<State>,
    /// Values written by the turn, by key. `None` removes the key.
    writes: BTreeMap<String, Option<Vec<u8>>>,
    /// Size of keys and values, including the writes.
    bytes: usize,
    quota_bytes: usize,
}

impl Host for TurnContext {
    fn get(&mut self, key: String) -> wasmtime::Result<Option<Vec<u8>>> {
        self.charge(key.len())?;
        let value = self.state.get(&key).cloned();
        self.charge_result(value.as_ref().map_or(0, Vec::len))?;
        Ok(value)
    }

    fn set(&mut self, key: String, value: Vec<u8>) -> wasmtime::Result<Result<(), StateError>> {
        self.charge(key.len() + value.len())?;
        self.state.check_room(&key)?;
        Ok(self.state.set(key, value))
    }

    fn delete(&mut self, key: String) -> wasmtime::Result<bool> {
        self.charge(key.len())?;
        self.state.check_room(&key)?;
        Ok(self.state.delete(key))
    }

    fn keys(&mut self, prefix: String, after: Option<String>, limit: u32) -> wasmtime::Result<Vec<String>> {
        self.charge(prefix.len() + after.as_ref().map_or(0, String::len))?;
        let keys = self.state.keys(&prefix, after.as_deref(), limit);
        self.charge_result(keys.iter().map(String::len).sum())?;
        Ok(keys)
    }

    fn compare_and_set(
        &mut self,
        key: String,
        expected: Option<Vec<u8>>,
        value: Vec<u8>,
    ) -> wasmtime::Result<Result<bool, StateError>> {
        self.charge(key.len() + expected.as_ref().map_or(0, Vec::len) + value.len())?;
        if self.state.get(&key) != expected.as_ref() {
            return Ok(Ok(false));
        }
        self.state.check_room(&key)?;
        Ok(self.state.set(key, value).map(|()| true))
    }
}

impl StateView {
    pub(crate) fn new(committed: Arc<State>, quota_kb: u32) -> Self {
        let bytes = state_bytes(&committed);
        StateView { committed, writes: BTreeMap::new(), bytes, quota_bytes: quota_kb as usize * 1024 }
    }

    /// Returns the size of keys and values, including the turn's writes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Checks that the turn may change this key in addition to those that it has already changed.
    fn check_room(&self, key: &str) -> Result<(), RuntimeError> {
        if self.writes.len() < MAX_KEYS_CHANGED || self.writes.contains_key(key) {
            return Ok(());
        }
        let message = format!(
            "a turn may change at most {MAX_KEYS_CHANGED} keys of its session's state; keep several values under one key, or \
             change the others in later turns"
        );
        Err(RuntimeError::LimitExceeded { limit: "state_keys_per_turn", message })
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Vec<u8>> {
        match self.writes.get(key) {
            Some(written) => written.as_ref(),
            None => self.committed.get(key),
        }
    }

    pub(crate) fn set(&mut self, key: String, value: Vec<u8>) -> Result<(), StateError> {
        check_key(&key).map_err(StateError::InvalidKey)?;
        let replaced = self.get(&key).map_or(0, |old| key.len() + old.len());
        let bytes = self.bytes - replaced + key.len() + value.len();
        if bytes > self.quota_bytes {
            return Err(StateError::QuotaExceeded(over_quota(bytes, self.quota_bytes)));
        }
        check_value(&key, &value).map_err(StateError::QuotaExceeded)?;
        self.bytes = bytes;
        self.writes.insert(key, Some(value));
        Ok(())
    }

    pub(crate) fn delete(&mut self, key: String) -> bool {
        let Some(old) = self.get(&key) else { return false };
        self.bytes -= key.len() + old.len();
        self.writes.insert(key, None);
        true
    }

    pub(crate) fn keys(&self, prefix: &str, after: Option<&str>, limit: u32) -> Vec<String> {
        let start = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        let limit = limit.min(MAX_KEYS_LISTED) as usize;
        let range = (start, Bound::<&str>::Unbounded);
        let committed = self.committed.range::<str, _>(range).map(|(key, _)| key);
        let committed = committed
            .take_while(|key| key.starts_with(prefix))
            .filter(|key| !self.writes.contains_key(*key))
            .take(limit);
        let written = self.writes.range::<str, _>(range).take_while(|(key, _)| key.starts_with(prefix));
        let written = written.filter(|(_, value)| value.is_some()).map(|(key, _)| key).take(limit);
        let mut keys: Vec<String> = committed.chain(written).cloned().collect();
        keys.sort_unstable();
        keys.truncate(limit);
        keys
    }

    /// Returns the turn's changes, to be committed.
    pub(crate) fn changes(&self) -> Vec<StateChange> {
        let changed = self.writes.iter().filter(|(key, value)| self.committed.get(*key) != value.as_ref());
        changed.map(|(key, value)| StateChange { key: key.clone(), value: value.clone() }).collect()
    }
}

/// Checks an imported state against the limits.
pub(crate) fn check(state: &State, limits: &Limits) -> Result<(), String> {
    let (mut bytes, quota_bytes) = (0, limits.state_kb as usize * 1024);
    for (key, value) in state {
        check_key(key)?;
        check_value(key, value)?;
        bytes += key.len() + value.len();
    }
    if bytes > quota_bytes { Err(over_quota(bytes, quota_bytes)) } else { Ok(()) }
}

fn check_key(key: &str) -> Result<(), String> {
    match key.len() {
        0 => Err("a key must not be empty".into()),
        1..=MAX_KEY_BYTES => Ok(()),
        size => Err(format!("a key has {size} bytes; at most {MAX_KEY_BYTES} are allowed")),
    }
}

fn check_value(key: &str, value: &[u8]) -> Result<(), String> {
    match value.len() {
        0..=MAX_VALUE_BYTES => Ok(()),
        size => Err(format!(
            "the value of {key:?} has {size} bytes; at most {MAX_VALUE_BYTES} are allowed; split it among several keys"
        )),
    }
}

fn over_quota(bytes: usize, quota_bytes: usize) -> String {
    format!(
        "the session's state would have {bytes} bytes, {} over the limit of {quota_bytes}; `state_kb` under [limits] in \
         agent.toml sets the limit",
        bytes - quota_bytes
    )
}

/// Applies committed changes to the values in memory.
pub(crate) fn apply(state: &mut State, changes: &[StateChange]) {
    for StateChange { key, value } in changes {
        match value {
            Some(value) => state.insert(key.clone(), value.clone()),
            None => state.remove(key),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(pairs: &[(&str, &str)]) -> StateView {
        let state = pairs.iter().map(|(key, value)| ((*key).to_owned(), value.as_bytes().to_vec())).collect();
        StateView::new(Arc::new(state), 1)
    }

    #[test]
    fn a_turn_reads_its_own_writes_and_only_changes_are_committed() {
        let mut state = view(&[("a", "1"), ("b", "2"), ("c", "3")]);
        state.set("a".into(), b"9".to_vec()).expect("small");
        state.set("b".into(), b"2".to_vec()).expect("small");
        assert!(state.delete("c".into()));
        assert!(!state.delete("c".into()));
        assert_eq!((state.get("a"), state.get("c")), (Some(&b"9".to_vec()), None));
        let change = |key: &str, value: Option<&str>| StateChange {
            key: key.into(),
            value: value.map(|v| v.as_bytes().to_vec()),
        };
        assert_eq!(state.changes(), [change("a", Some("9")), change("c", None)]);
    }

    #[test]
    fn keys_merge_committed_and_written_in_order() {
        let mut state = view(&[("p/1", ""), ("p/3", ""), ("q", "")]);
        state.set("p/2".into(), vec![]).expect("small");
        state.set("p/4".into(), vec![]).expect("small");
        state.delete("p/3".into());
        assert_eq!(state.keys("p/", None, 10), ["p/1", "p/2", "p/4"]);
        assert_eq!(state.keys("p/", Some("p/1"), 1), ["p/2"]);
        assert_eq!(state.keys("p/", Some("a"), 1), ["p/1"]);
        assert!(state.keys("x", None, 10).is_empty());
    }

    #[test]
    fn the_quota_counts_keys_and_values_and_credits_replaced_ones() {
        let mut state = view(&[("a", &"x".repeat(1000))]);
        let over = state.set("b".into(), vec![0; 100]).expect_err("1101 of 1024 bytes");
        assert!(matches!(over, StateError::QuotaExceeded(text) if text.contains("78 over the limit")));
        state.set("a".into(), vec![0; 1023]).expect("exactly full");
        assert!(state.delete("a".into()));
        state.set("b".into(), vec![0; 100]).expect("deleting freed space");
        for key in [String::new(), "k".repeat(MAX_KEY_BYTES + 1)] {
            assert!(matches!(state.set(key, vec![]), Err(StateError::InvalidKey(_))));
        }
    }

    #[test]
    fn a_turn_changes_a_bounded_number_of_keys() {
        let mut state = StateView::new(Arc::default(), 10_000);
        for key in 0..MAX_KEYS_CHANGED {
            state.check_room(&key.to_string()).expect("within the bound");
            state.set(key.to_string(), Vec::new()).expect("small");
        }
        state.check_room("7").expect("the key was already changed");
        let error = state.check_room("one too many").expect_err("over the bound");
        assert_eq!(error.code(), "limit_exceeded");
        assert!(error.to_string().contains("several values under one key"), "{error}");
    }

    #[test]
    fn the_size_of_a_value_is_bounded() {
        let mut state = StateView::new(Arc::default(), 1_024);
        state.set("full".into(), vec![0; MAX_VALUE_BYTES]).expect("exactly the maximum");
        let over = state.set("over".into(), vec![0; MAX_VALUE_BYTES + 1]).expect_err("a byte too many");
        let StateError::QuotaExceeded(message) = over else { panic!("{over:?}") };
        assert!(message.contains("\"over\" has 262145 bytes") && message.contains("split it"), "{message}");
        assert_eq!(state.get("over"), None);
    }

    #[test]
    fn an_imported_state_has_the_same_bounds() {
        let limits = Limits { state_kb: 1, ..Limits::default() };
        let state = |key: &str, bytes| State::from([(key.to_owned(), vec![0; bytes])]);
        check(&state("k", 1_023), &limits).expect("exactly full");
        for (state, expected) in [
            (state("k", 1_024), "1 over the limit of 1024"),
            (state("", 1), "must not be empty"),
            (state(&"k".repeat(257), 1), "257 bytes"),
            (state("k", MAX_VALUE_BYTES + 1), "split it"),
        ] {
            let message = check(&state, &limits).expect_err(expected);
            assert!(message.contains(expected), "{message}");
        }
    }
}
