//! The counts of one day by tenant and model, which can be read from the store again while more is counted.
//!
//! In a cluster, each host counts only its own use, and reads the sums of all hosts every now and then. A use that is counted while
//! the sums are read may or may not be in them, so it is added to them: for a moment it may count twice, until the next reading,
//! and never not at all.

use skep_store::{UsageCounts, UsageSum};
use std::collections::{BTreeMap, HashMap};

type Counts = HashMap<String, BTreeMap<String, UsageCounts>>;

#[derive(Default)]
pub(super) struct DayCounts {
    counts: Counts,
    /// The use since a reading began.
    meanwhile: Option<Counts>,
}

impl DayCounts {
    pub(super) fn count(&mut self, tenant: &str, model: &str, counts: &UsageCounts) {
        add(&mut self.counts, tenant, model, counts);
        if let Some(meanwhile) = &mut self.meanwhile {
            add(meanwhile, tenant, model, counts);
        }
    }

    /// Returns the counts of a tenant by model.
    pub(super) fn of(&self, tenant: &str) -> impl Iterator<Item = (&String, &UsageCounts)> {
        self.counts.get(tenant).into_iter().flatten()
    }

    pub(super) fn of_model(&self, tenant: &str, model: &str) -> Option<&UsageCounts> {
        self.counts.get(tenant)?.get(model)
    }

    /// Begins a reading of the sums in the store.
    pub(super) fn begin_reading(&mut self) {
        self.meanwhile = Some(Counts::default());
    }

    /// Replaces the counts with the sums that were read. A reading that another day interrupted has no effect.
    pub(super) fn end_reading(&mut self, sums: &[UsageSum]) {
        let Some(meanwhile) = self.meanwhile.take() else { return };
        self.counts = meanwhile;
        for UsageSum { group, model, counts, .. } in sums {
            add(&mut self.counts, group.as_deref().unwrap_or_default(), model, counts);
        }
    }
}

fn add(all: &mut Counts, tenant: &str, model: &str, counts: &UsageCounts) {
    all.entry(tenant.to_owned()).or_default().entry(model.to_owned()).or_default().add(counts);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(output_tokens: u64) -> UsageCounts {
        UsageCounts { output_tokens, ..UsageCounts::default() }
    }

    #[test]
    fn a_use_during_a_reading_is_not_lost() {
        let mut day = DayCounts::default();
        day.count("t", "m", &tokens(1));
        day.begin_reading();
        day.count("t", "m", &tokens(2));
        let (group, model) = (Some("t".to_owned()), "m".to_owned());
        let sums = [UsageSum { agent: None, group, day: 0, model, counts: tokens(10) }];
        day.end_reading(&sums);
        assert_eq!(day.of_model("t", "m"), Some(&tokens(12)));
        day.end_reading(&sums);
        assert_eq!(day.of_model("t", "m"), Some(&tokens(12)), "no reading was begun");
        day.begin_reading();
        day.end_reading(&sums);
        assert_eq!(day.of("t").map(|(_, counts)| *counts).collect::<Vec<_>>(), [tokens(10)]);
    }
}
