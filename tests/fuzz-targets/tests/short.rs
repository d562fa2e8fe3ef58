//! Runs each target for about a second, with its valid inputs, its regressions, and a fixed sequence of
//! mutations.

use skep_fuzz_targets::{Mutator, Target, run_watched};
use std::time::Duration;

/// No input may keep a host busy for this long, even on a loaded machine.
const TOO_LONG: Duration = Duration::from_secs(30);

fn check(name: &str) {
    let target = Target::named(name).expect("the target exists");
    let (seeds, regressions) = (target.seeds(), target.regressions());
    assert!(!seeds.is_empty(), "{name} has no valid inputs");
    let mut mutator = Mutator::new(20_261_122, seeds.clone(), target.words);
    let changed = (0..target.tries).map(|_| mutator.next_input());
    for (number, input) in seeds.iter().cloned().chain(regressions).chain(changed).enumerate() {
        let outcome = run_watched(target, &input);
        let shown = String::from_utf8_lossy(&input);
        let shown: String = shown.chars().take(2_000).collect();
        assert_eq!(outcome.panic, None, "input {number} of {name}: {shown:?}");
        assert!(outcome.time < TOO_LONG, "input {number} of {name} took {:?}: {shown:?}", outcome.time);
    }
}

/// Runs the targets one after the other, because a panic cannot be attributed to a test.
#[test]
fn no_input_makes_a_target_panic_or_hang() {
    for target in &skep_fuzz_targets::TARGETS {
        let began = std::time::Instant::now();
        check(target.name);
        println!("{}: {:?}", target.name, began.elapsed());
    }
}
