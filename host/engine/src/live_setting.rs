//! A setting that is replaced while the host runs.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

/// The current value of a setting that can change. Clones share it. Those that have read it keep what they read.
pub struct LiveSetting<T>(Arc<RwLock<Arc<T>>>);

impl<T> LiveSetting<T> {
    /// Creates a setting with its first value.
    pub fn new(value: T) -> Self {
        Arc::new(value).into()
    }

    /// Returns the current value.
    pub fn now(&self) -> Arc<T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the value for everyone who reads it from now on.
    pub fn replace(&self, value: T) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
    }

    /// Returns a copy of the value that later replacements do not affect.
    pub fn pinned(&self) -> Self {
        self.now().into()
    }
}

impl<T> From<Arc<T>> for LiveSetting<T> {
    fn from(value: Arc<T>) -> Self {
        LiveSetting(Arc::new(RwLock::new(value)))
    }
}

impl<T> Clone for LiveSetting<T> {
    fn clone(&self) -> Self {
        LiveSetting(self.0.clone())
    }
}

impl<T: Default> Default for LiveSetting<T> {
    fn default() -> Self {
        LiveSetting::new(T::default())
    }
}

impl<T: fmt::Debug> fmt::Debug for LiveSetting<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replacement_reaches_clones_and_neither_readers_nor_pinned_values() {
        let setting = LiveSetting::new(1);
        let (clone, pinned, read) = (setting.clone(), setting.pinned(), setting.now());
        setting.replace(2);
        assert_eq!((*clone.now(), *pinned.now(), *read), (2, 1, 1));
    }
}
