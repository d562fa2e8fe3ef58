//! Crash tests of deployments and rollbacks, with the schedules of their manifests.

use super::{
    super::{fixture::Host, guest::Guest, outside::Outside, waker::waker},
    Scenario, cut_off_at_every_write,
};
use crate::{Clock, Manifest};

/// Descriptions of the two versions, which make their components differ.
const DESCRIBE: [&str; 2] = ["nop", "nop nop"];

/// Returns the manifest of a version. The name of its schedule has the version's number.
fn manifest(version: usize) -> Manifest {
    let schedule = format!("[[schedule]]\nname = \"v{version}\"\nevery = \"1h\"\nsession = \"s\"");
    Manifest::from_toml(&format!("name = \"w\"\n{schedule}")).expect("valid")
}

fn component(version: usize) -> Vec<u8> {
    Guest { describe: DESCRIBE[version - 1], ..waker() }.component()
}

/// Deploys a second version, or rolls back to the first one.
struct Change {
    outside: Outside,
    puts_back: bool,
}

impl Scenario for Change {
    type Observed = ();

    fn outside(&self) -> &Outside {
        &self.outside
    }

    async fn prepare(&self, host: &Host) {
        for version in 1..=1 + usize::from(self.puts_back) {
            host.agents.deploy(manifest(version), component(version), "ann").await.expect("valid");
        }
    }

    async fn act(&self, host: &Host, _clock: &Clock, (): &mut ()) {
        consistent(host).await;
        let summary = match self.puts_back {
            true => host.agents.rollback("w", Some(1)).await,
            false => host.agents.deploy(manifest(2), component(2), "ann").await,
        };
        assert_eq!(summary.expect("the call succeeds").version, if self.puts_back { 1 } else { 2 });
    }

    async fn check(&self, host: &Host, (): &()) -> usize {
        let expected = if self.puts_back { 1 } else { 2 };
        assert_eq!(consistent(host).await, expected);
        let versions = host.agents.versions("w").await.expect("the agent exists");
        assert_eq!(versions.len(), 2, "a repeated deployment does not create a version: {versions:?}");
        0
    }
}

/// Checks that exactly one version is active with its schedules and can be called, and returns its
/// number.
async fn consistent(host: &Host) -> u64 {
    assert!(host.agents.failed_agents().is_empty(), "{:?}", host.agents.failed_agents());
    let versions = host.agents.versions("w").await.expect("the agent exists");
    let active: Vec<u64> =
        versions.iter().filter(|version| version.is_active).map(|version| version.version).collect();
    let [version] = active[..] else { panic!("{versions:?}") };
    assert_eq!(host.agents.agent("w").expect("the agent can be called").summary.version, version);
    let schedules = host.agents.schedules(None, 10).await.expect("listed");
    let names: Vec<&str> = schedules.iter().map(|schedule| schedule.name.as_str()).collect();
    assert_eq!(names, [format!("v{version}")]);
    version
}

#[test]
fn a_deployment_survives_every_crash() {
    let tally = cut_off_at_every_write(&Change { outside: Outside::start(), puts_back: false });
    assert!(tally.crashes > 4, "{tally:?}");
}

#[test]
fn a_rollback_survives_every_crash() {
    let tally = cut_off_at_every_write(&Change { outside: Outside::start(), puts_back: true });
    assert!(tally.crashes > 4, "{tally:?}");
}
