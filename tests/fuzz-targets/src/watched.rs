//! Runs a target and notices panics, also those on other threads and those that somebody catches.

use crate::Target;
use std::{
    panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook},
    sync::{
        Mutex, Once, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

static PANICS: AtomicUsize = AtomicUsize::new(0);
static LAST: Mutex<String> = Mutex::new(String::new());

/// What a run came to.
pub struct Outcome {
    /// What panicked.
    pub panic: Option<String>,
    pub time: Duration,
}

pub fn run_watched(target: &Target, input: &[u8]) -> Outcome {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            *LAST.lock().unwrap_or_else(PoisonError::into_inner) = panic.to_string();
            before(panic);
        }));
    });
    let (before, began) = (PANICS.load(Ordering::SeqCst), Instant::now());
    let caught = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    let time = began.elapsed();
    let has_panicked = caught.is_err() || PANICS.load(Ordering::SeqCst) != before;
    let panic = has_panicked.then(|| LAST.lock().unwrap_or_else(PoisonError::into_inner).clone());
    Outcome { panic, time }
}
