//! The flags that make a host one of a cluster.

use std::path::PathBuf;

use anyhow::Result;

use crate::cluster_setup::ClusterSetup;
use crate::config::RoleSetting;

#[derive(Debug, Clone, clap::Args)]
pub(super) struct ClusterFlags {
    /// Share the PostgreSQL database with other hosts: each session is at one of them, and they replace each other
    #[arg(long, conflicts_with_all = ["standby", "ephemeral"])]
    pub(super) cluster: bool,
    /// Address at which the other hosts of the cluster reach this one [default: the one that it listens on]
    #[arg(long, value_name = "URL")]
    pub(super) cluster_url: Option<String>,
    /// File with the key that all hosts of the cluster have; SKEP_CLUSTER_KEY can hold the key instead
    #[arg(long, value_name = "FILE")]
    pub(super) cluster_key_file: Option<PathBuf>,
    /// Role of the host in its cluster: a gateway has no model, and other hosts compute its generations; a prefill host computes
    /// long prompts for decode hosts; a balancer passes all requests on to the others [default: all]
    #[arg(long, value_name = "ROLE")]
    pub(super) role: Option<RoleSetting>,
}

impl ClusterFlags {
    /// Applies the flags that were given, and checks the role. `names_models` says whether the flags or the file name models.
    pub(super) fn apply(&self, setup: &mut ClusterSetup, names_models: bool) -> Result<()> {
        setup.enabled |= self.cluster;
        setup.url = self.cluster_url.clone().or(setup.url.take());
        setup.key_file = self.cluster_key_file.clone().or(setup.key_file.take());
        setup.role = self.role.map_or(setup.role, Into::into);
        setup.check_role(names_models)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Args, options};
    use crate::config::Config;
    use crate::server_options::ServerOptions;
    use anyhow::Result;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Wrapper {
        #[command(flatten)]
        args: Args,
    }

    fn read(flags: &[&str], file: &str) -> Result<ServerOptions> {
        let arguments = ["up"].into_iter().chain(flags.iter().copied());
        options(&Wrapper::try_parse_from(arguments)?.args, &Config::parse(file)?)
    }

    #[test]
    fn a_gateway_has_no_model() {
        let gateway = ["--cluster", "--role", "gateway"];
        let in_file = "[cluster]\nenabled = true\nrole = \"gateway\"\n";
        for options in [read(&gateway, ""), read(&[], in_file)] {
            let options = options.expect("other hosts have models");
            assert!(!options.cluster.role.computes() && options.local_models().is_empty());
        }
        let options = read(&["--role", "all"], in_file).expect("a flag overrides the file");
        assert_eq!((options.cluster.role.computes(), options.local_models().len()), (true, 1));
        for (flags, file) in [
            (&["--cluster", "--role", "gateway", "--model", "x.gguf"][..], ""),
            (&gateway[..], "model = \"x.gguf\"\n"),
            (&gateway[..], "[[model]]\nsource = \"x.gguf\"\n"),
        ] {
            let error = read(flags, file).expect_err("it names a model").to_string();
            assert!(error.contains("hint: remove --model (or model and [[model]] in skep.toml)"), "{error}");
        }
        let error = read(&["--role", "gateway"], "").expect_err("there is nobody else").to_string();
        assert!(error.contains("hint: add --cluster"), "{error}");
        let error = read(&["--cluster", "--role", "router"], "").expect_err("no such role").to_string();
        assert!(error.contains("[possible values: all, gateway, prefill, decode, balancer]"), "{error}");
    }
}
