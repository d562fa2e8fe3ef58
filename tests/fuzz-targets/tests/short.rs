//! Each target for about a second: its real inputs, those that made it panic once, and changes of them, always the same.

use skep_fuzz_targets::{Mutator, Target, run_watched};
use std::time::Duration;

/// No input keeps a host busy for so long, also on a machine that does other things.
const TOO_LONG: Duration = Duration::from_secs(30);

fn check(name: &str) {
    let target = Target::named(name).expect("there is one");
    let (seeds, regressions) = (target.seeds(), target.regressions());
    assert!(!seeds.is_empty(), "{name} has no real inputs");
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

/// One after the other, because a panic is nobody's in particular.
#[test]
fn no_input_makes_a_target_panic_or_hang() {
    for target in &skep_fuzz_targets::TARGETS {
        let began = std::time::Instant::now();
        check(target.name);
        println!("{}: {:?}", target.name, began.elapsed());
    }
}
