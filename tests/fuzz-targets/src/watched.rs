//! Runs a target and detects panics, including panics on other threads and panics that are caught.

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

/// The outcome of a run.
pub struct Outcome {
    /// The message of the panic, if there was one.
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
