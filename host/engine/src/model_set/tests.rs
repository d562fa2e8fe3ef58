//! Tests of loads and unloads, with real engines of a tiny model.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use skep_model::{LoadedModel, Sampling};

use super::{LocalModel, ModelChanges, ModelSet, ModelState, OtherModels, ServedModel, check_name};
use crate::chat::{ChatEvent, ChatFinish, ChatMessage, ChatOptions, ChatOutcome, Input, RemoteStream};
use crate::tests::executors::Slow;
use crate::tests::fixture::{collect, engine, first_token, greedy, model};
use crate::{
    Engine, EngineError, EngineOptions, LoadProgress, Model, ModelDigest, RemoteInfo, RemoteModel, TokenEvent,
};

/// Longer than anything in these tests takes.
const LONG: Duration = Duration::from_secs(60);

fn start(name: &str) -> Result<Engine, String> {
    start_model(name, model(4096, |executor| Box::new(executor)))
}

/// Starts an engine that takes seconds for an answer of 400 tokens.
fn start_slow(name: &str) -> Result<Engine, String> {
    let token_time = Duration::from_millis(10);
    start_model(name, model(4096, |executor| Box::new(Slow::default().guard(executor, token_time))))
}

fn start_model(name: &str, mut loaded: LoadedModel) -> Result<Engine, String> {
    loaded.name = name.to_owned();
    Engine::start(loaded, EngineOptions::default()).map_err(|error| error.to_string())
}

fn declared(name: &'static str) -> LocalModel {
    LocalModel::new(name, "cpu", move |_: &LoadProgress| start(name))
}

fn engine_of(model: Model) -> Engine {
    model.engine().expect("a model of this process").clone()
}

/// Waits until this process has no thread of this name.
async fn thread_ends(name: &str) {
    let ended = async {
        while has_thread(name) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LONG, ended).await.expect("the thread ends");
}

/// Returns whether this process has a thread of this name.
fn has_thread(name: &str) -> bool {
    let threads = std::fs::read_dir("/proc/self/task").expect("Linux lists the threads");
    threads.flatten().any(|thread| {
        std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
    })
}

async fn generated(model: Model) -> usize {
    collect(engine_of(model).generate(greedy("a", 4)).expect("accepted")).await.expect("an answer").ids.len()
}

#[tokio::test]
async fn a_request_that_does_not_wait_gets_the_load_progress() {
    let (release, held) = mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let slow = LocalModel::new("slow", "cpu", move |progress: &LoadProgress| {
        progress.begin("reading weights", None);
        assert_eq!(progress.percent(), None, "the size is not known yet");
        progress.expect(200);
        progress.advance_to(50);
        held.lock().expect("not poisoned").recv().expect("the test releases it");
        start("slow")
    });
    let models = ModelSet::new(engine()).with(LocalModel { load_wait: Duration::from_millis(100), ..slow });
    let unloaded = models.get(Some("slow")).expect_err("nobody has loaded it");
    assert_eq!(unloaded.code(), "model_unloaded");
    let refused = models.engine_at_once("slow").expect_err("another host does not wait");
    assert_eq!(refused.code(), "model_loading", "the load begins for later requests");
    let loading = ModelState::Loading { step: "reading weights".into(), percent: Some(25) };
    let begun = async {
        while models.find(Some("slow")).expect("declared").state() != loading {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LONG, begun).await.expect("the loader reports its progress");
    let error = models.ready(Some("slow")).await.expect_err("the load is held");
    let EngineError::ModelLoading { name, retry_after_ms, progress } = &error else { panic!("{error}") };
    assert_eq!((name.as_str(), progress.as_str()), ("slow", "reading weights, 25 %"));
    assert!((500..=30_000).contains(retry_after_ms), "{error}");
    assert_eq!(models.find(Some("slow")).expect("declared").state(), loading);
    assert_eq!(models.iter().count(), 1, "a model that is being loaded is not used");
    release.send(()).expect("the loader waits");
    assert_eq!(models.settled("slow").await.expect("known"), ModelState::Loaded);
    assert_eq!(models.engine_at_once("slow").expect("loaded").info().name, "slow");
    assert_eq!(generated(models.ready(Some("slow")).await.expect("loaded")).await, 4);
    assert_eq!(models.find(Some("slow")).expect("declared").context_length(), Some(512));
}

#[tokio::test]
async fn sampling_parameters_are_those_of_the_declaration_until_a_load_finds_those_of_the_files() {
    let recommended = Sampling { temperature: 0.6, top_k: 20, ..Sampling::default() };
    let models = ModelSet::new(LocalModel { sampling: Some(recommended.clone()), ..declared("a") })
        .with(declared("b"));
    let sampling = |name| models.find(Some(name)).expect("declared").sampling();
    assert_eq!((sampling("a"), sampling("b")), (Some(recommended), None));
    let loaded = models.ready(Some("a")).await.expect("loaded");
    assert_eq!(sampling("a"), Some(loaded.sampling()));
    assert_eq!(loaded.sampling(), Sampling::default(), "the files of the tiny model recommend nothing");
}

#[tokio::test]
async fn a_failed_load_is_reported_and_repeated_on_request() {
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = tries.clone();
    let flaky = LocalModel::new("flaky", "cpu", move |_: &LoadProgress| {
        match counted.fetch_add(1, Ordering::Relaxed) {
            0 => Err("no memory".to_owned()),
            1 => panic!("simulated fault of a loader"),
            _ => start("flaky"),
        }
    });
    let models = ModelSet::new(engine()).with(flaky);
    for _ in 0..2 {
        let error = models.ready(Some("flaky")).await.expect_err("the load fails");
        assert_eq!(error.to_string(), "the model flaky is not loaded: no memory");
    }
    assert_eq!(tries.load(Ordering::Relaxed), 1, "requests do not repeat a load that has just failed");
    models.load("flaky").expect("a person may");
    let panicked = ModelState::Failed("loading the model panicked".into());
    assert_eq!(models.settled("flaky").await.expect("known"), panicked);
    models.load("flaky").expect("a person may");
    assert_eq!(models.settled("flaky").await.expect("known"), ModelState::Loaded);
}

#[tokio::test]
async fn loads_that_share_a_device_follow_one_another() {
    assert_eq!(loads_at_once([&["cpu"], &["cpu"], &["cpu"]]).await, 1);
    // Each pair of these models shares a device, and they name their devices in different orders.
    let rings: [&[&str]; 3] = [&["cuda:0", "cuda:1"], &["cuda:2", "cuda:1"], &["cuda:0", "cuda:2"]];
    assert_eq!(loads_at_once(rings).await, 1);
}

/// Loads three models on these devices, and returns how many were being loaded at the same time at most.
async fn loads_at_once(devices: [&[&str]; 3]) -> usize {
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counting = |name: &'static str, devices: &[&str]| {
        let (running, most) = (running.clone(), most.clone());
        let devices = devices.iter().map(|device| (*device).to_owned()).collect();
        let model = LocalModel::new(name, "cpu", move |_: &LoadProgress| {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let started = start(name);
            running.fetch_sub(1, Ordering::SeqCst);
            started
        });
        LocalModel { devices, ..model }
    };
    let models = ModelSet::new(counting("a", devices[0]))
        .with(counting("b", devices[1]))
        .with(counting("c", devices[2]));
    let ready = ["a", "b", "c"].map(|name| models.ready(Some(name)));
    for model in futures::future::join_all(ready).await {
        model.expect("loaded");
    }
    most.load(Ordering::SeqCst)
}

#[tokio::test]
async fn an_unloaded_model_finishes_its_work_frees_its_memory_and_is_reloaded_on_request() {
    let models = ModelSet::new(declared("unl"));
    let used = models.ready(None).await.expect("loaded");
    let mut running = engine_of(used.clone()).generate(greedy("a long answer", 200)).expect("accepted");
    first_token(&mut running).await;
    assert!(has_thread("engine-0-unl"));
    models.unload("unl", LONG).expect("it has begun");
    assert_eq!(models.find(None).expect("known").state(), ModelState::Unloading);
    assert_eq!(models.get(None).expect_err("nobody gets it anymore").code(), "model_loading");
    assert_eq!(models.load("unl").expect_err("it is being unloaded").code(), "model_loading");
    let waiting = tokio::spawn({
        let models = models.clone();
        async move { generated(models.ready(None).await.expect("loaded again")).await }
    });
    let mut rest = 0;
    while let Some(event) = running.next().await {
        rest += usize::from(matches!(event.expect("it may end"), TokenEvent::Token(_)));
    }
    assert_eq!(rest, 199);
    assert_eq!(generated(used).await, 4, "requests that have the model may continue to use it");
    assert_eq!(waiting.await.expect("no panic"), 4);
    assert_eq!(models.find(None).expect("known").state(), ModelState::Loaded);
    models.unload("unl", LONG).expect("it has begun");
    assert_eq!(models.settled("unl").await.expect("known"), ModelState::Unloaded);
    thread_ends("engine-0-unl").await;
}

#[tokio::test]
async fn a_model_that_a_person_unloads_stays_unloaded_unless_it_is_loaded_on_demand() {
    let by_hand = |name| LocalModel { on_demand: false, ..declared(name) };
    let models = ModelSet::new(by_hand("kept")).with(declared("lazy"));
    for name in ["kept", "lazy"] {
        models.ready(Some(name)).await.expect("the first request loads it");
        models.unload(name, LONG).expect("it has begun");
        assert_eq!(models.settled(name).await.expect("known"), ModelState::Unloaded);
    }
    models.ready(Some("lazy")).await.expect("loaded again");
    let error = models.ready(Some("kept")).await.expect_err("a person has unloaded it");
    assert_eq!(error.code(), "model_unloaded");
    assert!(error.to_string().contains("`skep model load kept`"), "{error}");
    let in_a_route = models.for_routes().remove(0);
    let error =
        in_a_route.chat(&[ChatMessage::user("a")], ChatOptions::default()).expect("begun").outcome().await;
    assert_eq!(error.expect_err("it stays unloaded").code(), "model_unloaded");
    models.load("kept").expect("a person may");
    assert_eq!(generated(models.ready(Some("kept")).await.expect("loaded")).await, 4);
}

#[tokio::test]
async fn a_member_of_a_route_is_local_and_its_context_is_known_once_it_is_loaded() {
    let models = ModelSet::new(declared("member"));
    let member = models.for_routes().remove(0);
    assert!(member.is_local() && member.engine().is_none());
    assert_eq!(member.context_length(), None);
    member.ready().await.expect("loaded");
    let served = models.find(None).expect("known");
    assert_eq!(served.state(), ModelState::Loaded);
    assert!(served.context_length().is_some());
    assert_eq!(member.context_length(), served.context_length());
}

#[tokio::test]
async fn an_idle_model_that_is_loaded_at_the_start_is_loaded_again_by_a_request() {
    let idle_unload = Some(Duration::from_millis(20));
    let models = ModelSet::new(LocalModel { idle_unload, on_demand: false, ..declared("idle-start") });
    drop(models.ready(None).await.expect("loaded"));
    let unloaded = async {
        while models.find(None).expect("known").state() != ModelState::Unloaded {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, unloaded).await.expect("it is unloaded");
    models.ready(None).await.expect("loaded again");
}

#[tokio::test]
async fn the_number_of_requests_that_wait_for_a_load_is_bounded() {
    let (release, held) = mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let models = ModelSet::new(LocalModel::new("slow", "cpu", move |_: &LoadProgress| {
        held.lock().expect("not poisoned").recv().expect("the test releases it");
        start("slow")
    }));
    let waits = (0..1024).map(|_| {
        let models = models.clone();
        tokio::spawn(async move { models.ready(None).await.map(drop) })
    });
    let waits: Vec<_> = waits.collect();
    // The runtime of the test polls some of them between two looks at the test itself.
    for _ in 0..1024 {
        tokio::task::yield_now().await;
    }
    let error = models.ready(None).await.expect_err("too many wait already");
    assert_eq!(error.code(), "model_loading");
    release.send(()).expect("the load waits");
    for wait in waits {
        wait.await.expect("no panic").expect("loaded");
    }
    models.ready(None).await.expect("nobody waits anymore");
}

#[tokio::test]
async fn requests_running_at_the_unload_deadline_are_cut_off() {
    let models = ModelSet::new(LocalModel::new("cut", "cpu", |_: &LoadProgress| start_slow("cut")));
    let held = engine_of(models.ready(None).await.expect("loaded"));
    let mut running = held.generate(greedy("a long answer", 400)).expect("accepted");
    first_token(&mut running).await;
    models.unload("cut", Duration::ZERO).expect("it has begun");
    assert!(matches!(collect(running).await, Err(EngineError::ShuttingDown)));
    assert_eq!(models.settled("cut").await.expect("known"), ModelState::Unloaded);
    thread_ends("engine-0-cut").await;
    assert!(matches!(held.generate(greedy("more", 4)), Err(EngineError::ShuttingDown)));
}

#[tokio::test]
async fn an_idle_model_is_unloaded_and_one_in_use_is_not() {
    let idle_unload = Some(Duration::from_millis(100));
    let models = ModelSet::new(LocalModel { idle_unload, ..declared("idle") });
    let used = models.ready(None).await.expect("loaded");
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(models.find(None).expect("known").state(), ModelState::Loaded, "somebody has it");
    drop(used);
    let unloaded = async {
        while models.find(None).expect("known").state() != ModelState::Unloaded {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONG, unloaded).await.expect("it is unloaded");
    assert_eq!(generated(models.ready(None).await.expect("loaded again")).await, 4);
}

#[tokio::test]
async fn an_alias_is_pointed_at_another_model() {
    let models = ModelSet::new(declared("a")).with(declared("b"));
    models.set_alias("fast", "a").expect("valid");
    assert_eq!(models.ready(Some("fast")).await.expect("loaded").name(), "a");
    models.set_alias("fast", "b").expect("valid");
    assert_eq!(models.ready(Some("fast")).await.expect("loaded").name(), "b");
    assert_eq!((models.aliases_of("a"), models.aliases_of("b")), (vec![], vec!["fast".to_owned()]));
    models.set_alias("fast", "nowhere").expect_err("an alias names a model");
    let error = models.set_alias("a", "b").expect_err("a model has this name").to_string();
    assert!(error.contains("\"a\" is the name of a model"), "{error}");
}

#[tokio::test]
async fn model_changes_are_atomic_and_holders_keep_their_model() {
    let models = ModelSet::new(declared("old")).with(declared("kept"));
    models.set_alias("fast", "old").expect("valid");
    models.set_alias("smart", "old").expect("valid");
    let used = models.ready(Some("fast")).await.expect("loaded");
    let mut running = engine_of(used.clone()).generate(greedy("a long answer", 100)).expect("accepted");
    first_token(&mut running).await;
    let pinned = models.pinned();
    let changes = ModelChanges {
        removed: vec!["old".to_owned()],
        put: vec![declared("new").into()],
        aliases: vec![("fast".to_owned(), "new".to_owned())],
        ..ModelChanges::default()
    };
    let error = models.make_changes(changes.clone()).err().expect("the default model would be gone");
    assert_eq!(error.code(), "model_unknown");
    assert_eq!((models.served().len(), models.find(Some("fast")).expect("as before").name()), (2, "old"));
    let changes = ModelChanges { default: Some("fast".to_owned()), ..changes };
    let tried = models.with_changes(changes.clone()).expect("valid");
    assert_eq!((tried.default_name(), models.default_name()), ("new".to_owned(), "old".to_owned()));
    drop(tried);
    let retired = models.make_changes(changes).expect("valid");
    let names: Vec<String> = models.served().iter().map(|model| model.name().to_owned()).collect();
    assert_eq!((names, models.default_name()), (vec!["kept".to_owned(), "new".to_owned()], "new".to_owned()));
    assert!(models.is_alias("fast") && !models.is_alias("smart"), "an alias goes with its model");
    assert_eq!(models.get(Some("old")).expect_err("it is gone").code(), "model_unknown");
    let mut rest = 0;
    while let Some(event) = running.next().await {
        rest += usize::from(matches!(event.expect("it may end"), TokenEvent::Token(_)));
    }
    assert_eq!(rest, 99);
    assert_eq!(generated(used).await, 4, "requests that have the model may continue to use it");
    tokio::time::timeout(LONG, retired).await.expect("nobody uses it anymore");
    thread_ends("engine-0-old").await;
    assert_eq!(generated(pinned.ready(Some("fast")).await.expect("loaded again")).await, 4);
    assert!(has_thread("engine-0-old"), "what has the former names gets the former model");
    drop(pinned);
    thread_ends("engine-0-old").await;
}

#[tokio::test]
async fn a_replaced_model_is_new_and_the_others_stay() {
    let models = ModelSet::new(declared("same")).with(declared("other"));
    let slot = |name: &str| match models.find(Some(name)).expect("declared") {
        ServedModel::Local(slot) => slot,
        ServedModel::Remote(_) => panic!("{name} is of this process"),
    };
    let (same, other) = (slot("same"), slot("other"));
    let changes = ModelChanges { put: vec![declared("same").into()], ..ModelChanges::default() };
    models.make_changes(changes).expect("valid").await;
    assert!(!Arc::ptr_eq(&slot("same"), &same) && Arc::ptr_eq(&slot("other"), &other));
}

#[tokio::test]
async fn a_model_that_was_given_as_an_engine_stays_loaded() {
    let models = ModelSet::new(engine());
    let error = models.unload("tiny", LONG).expect_err("it could not be loaded again").to_string();
    assert!(error.contains("stays loaded"), "{error}");
    assert_eq!(models.ready(None).await.expect("loaded").name(), "tiny");
}

#[test]
fn names_of_local_models_cannot_be_mistaken_for_others() {
    for name in ["smollm2-135m", "Qwen2.5_0.5B", "a:b"] {
        check_name(name).expect(name);
    }
    for name in ["", "a/b", "agent:x", "default", "a b", "é"] {
        check_name(name).expect_err(name);
    }
}

/// A model that another host computes.
struct Elsewhere(RemoteInfo);

impl RemoteModel for Elsewhere {
    fn info(&self) -> &RemoteInfo {
        &self.0
    }

    fn hosts(&self) -> Vec<i64> {
        vec![7]
    }

    fn ask(&self, _input: Input, _options: ChatOptions) -> RemoteStream {
        let outcome = ChatOutcome::remote(self.0.name.clone(), ChatFinish::Stop);
        Box::pin(futures::stream::iter([Ok(ChatEvent::Finished(outcome))]))
    }

    fn free_slots(&self) -> usize {
        1
    }

    fn problem(&self) -> Option<String> {
        None
    }
}

/// Returns models of other hosts, with aliases that each mean one of them.
fn others(models: &[&str], aliases: &[(&str, &str)]) -> OtherModels {
    let remote = |name: &&str| {
        let (name, digest) = ((*name).to_owned(), ModelDigest::default());
        let info = RemoteInfo { name, digest, context_length: Some(64), created_unix_s: 0 };
        ServedModel::Remote(Arc::new(Elsewhere(info)))
    };
    let aliases: BTreeMap<String, String> =
        aliases.iter().map(|(alias, model)| ((*alias).to_owned(), (*model).to_owned())).collect();
    OtherModels {
        models: models.iter().map(remote).collect(),
        aliases,
        default: models.first().map(|name| (*name).to_owned()),
    }
}

fn names_of(models: &[ServedModel]) -> Vec<&str> {
    models.iter().map(ServedModel::name).collect()
}

#[tokio::test]
async fn a_host_without_models_serves_those_of_other_hosts() {
    let models = ModelSet::empty();
    let error = models.find(None).err().expect("there is none").to_string();
    assert_eq!(error, "no model is called `default`; available models: none");
    assert_eq!(models.default_name(), "");
    models.set_others(others(&["big", "small"], &[("fast", "small")]));
    assert_eq!(models.ready(None).await.expect("the default of the others").name(), "big");
    let fast = models.find(Some("fast")).expect("an alias of another host");
    assert_eq!((fast.name(), fast.hosts(), fast.state()), ("small", vec![7], ModelState::Remote));
    assert!(models.is_alias("fast") && models.aliases_of("small") == ["fast"]);
    let error = models.find(Some("none")).err().expect("unknown").to_string();
    assert_eq!(error, "no model is called `none`; available models: big, small");
    assert!(models.own().is_empty() && models.for_routes().is_empty(), "nothing of it is this host's");
    assert!(models.computed_here("big").is_none(), "a request is never passed on twice");
    // A turn keeps the models that it began with.
    let pinned = models.pinned();
    models.make_changes(ModelChanges::default()).expect("no change of a default that is not there").await;
    models.set_others(OtherModels::default());
    models.find(Some("big")).err().expect("its host has left");
    let answer = pinned.get(Some("big")).expect("kept").chat(&[], ChatOptions::default()).expect("asked");
    assert_eq!(answer.outcome().await.expect("an answer").text, "big");
}

#[test]
fn a_model_or_an_alias_of_this_host_hides_one_of_another_host() {
    let models = ModelSet::new(declared("own")).with(declared("second"));
    models.set_alias("fast", "second").expect("a model");
    models.set_others(others(&["own", "big", "fast"], &[("second", "big"), ("quick", "own")]));
    assert_eq!(names_of(&models.served()), ["own", "second", "big"]);
    assert_eq!(names_of(&models.own()), ["own", "second"]);
    assert_eq!(models.default_name(), "own");
    for (name, expected) in [("own", "own"), ("second", "second"), ("fast", "second"), ("quick", "own")] {
        let found = models.find(Some(name)).expect("known");
        assert_eq!((found.name(), found.hosts()), (expected, Vec::new()), "{name}");
    }
    assert_eq!(models.aliases_of("own"), ["quick"]);
    assert!(!models.is_alias("second") && models.aliases_of("big").is_empty());
    assert!(models.computed_here("quick").is_some(), "an alias of this host's own model");
    let error = models.load("big").expect_err("only its host can load it").to_string();
    assert!(error.contains("only its server can load"), "{error}");
}
