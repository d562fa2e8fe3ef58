//! Tests of devices and their buffers, on emulated devices and on real ones if there are some.

use super::*;
use crate::Fault;
use crate::cuda::contexts;
use crate::cuda::embedding::{self, EmbeddingParams, Table};
use crate::cuda::on_device;
use crate::cuda::{Family, Kernel};

#[test]
fn a_missing_device_is_an_error() {
    let error = Device::open(1000, &Arc::new(on_device::compiler()))
        .err()
        .expect("no machine has 1000 devices")
        .to_string();
    assert!(error.contains("1000") || error.contains("driver"), "{error}");
}

/// Runs a check with an emulated device, and with a real one if there is one.
fn with_devices(check: impl Fn(&Device)) {
    check(&Device::emulated(Emulation::default()));
    on_device::with(check);
}

#[test]
fn written_bytes_are_read_back_and_invalid_sizes_are_errors() {
    with_devices(|device| {
        let mut buffer = device.zeroed(1000).unwrap();
        let mut bytes = vec![7; 1000];
        buffer.read(&mut bytes).unwrap();
        assert_eq!(bytes, vec![0; 1000]);
        let written: Vec<u8> = (0..1000).map(|i| i as u8).collect();
        buffer.write(&written).unwrap();
        buffer.read(&mut bytes).unwrap();
        assert_eq!(bytes, written);
        assert!(buffer.write(&written[1..]).is_err());
        let free = device.memory().unwrap().free as usize;
        assert!(matches!(device.zeroed(free + (1 << 30)), Err(KernelError::DeviceMemory { .. })));
        assert_eq!(device.zeroed(0).unwrap().bytes(), 0);
        assert!(buffer.slice().part(900..1001).is_err());
    });
}

#[test]
fn invalid_launches_are_errors() {
    let no_such_kernel = Kernel::of(Family::Gemm).size(7);
    on_device::with(|device| {
        let launch = Launch::new(no_such_kernel, [1, 1, 1], 32);
        // SAFETY: both launches are rejected before the kernel runs.
        let unknown = unsafe { device.launch(&launch, &0u64) };
        assert!(matches!(unknown, Err(KernelError::NoKernel { .. })));
        let launch = Launch { shared_bytes: 1 << 30, kernel: Kernel::of(Family::Embedding), ..launch };
        let too_much = unsafe { device.launch(&launch, &0u64) };
        assert!(too_much.unwrap_err().to_string().contains("shared memory"));
    });
    let device = Device::emulated(Emulation::default());
    let launch = Launch::new(no_such_kernel, [1, 1, 1], 32);
    // SAFETY: there is no such kernel to run.
    unsafe { device.launch(&launch, &0u64) }.expect("the failure is reported later");
    assert!(device.synchronize().unwrap_err().to_string().contains("no kernel of this name"));
}

#[test]
fn copies_events_and_recordings_keep_their_order() {
    with_devices(|device| {
        let mut host = device.host_buffer(8).unwrap();
        let buffers = [0, 1, 2].map(|_| Arc::new(device.zeroed(8).unwrap()));
        let copy = || device.copy(buffers[0].slice(), buffers[1].slice());
        let recording = device.record(buffers.to_vec(), copy).unwrap();
        let begun = device.timed_event().unwrap();
        begun.record().unwrap();
        for value in [3, 4] {
            device.synchronize().unwrap();
            host.bytes_mut().fill(value);
            device.upload(&host, 0, buffers[0].slice()).unwrap();
            recording.replay().unwrap();
        }
        let event = device.timed_event().unwrap();
        event.record().unwrap();
        device.wait(&event).unwrap();
        let half = |buffer: usize, range| buffers[buffer].slice().part(range).unwrap();
        device.copy(half(1, 0..4), half(2, 4..8)).unwrap();
        device.download(buffers[2].slice(), &mut host, 0).unwrap();
        device.synchronize().unwrap();
        assert_eq!(host.bytes(), [0, 0, 0, 0, 4, 4, 4, 4]);
        assert!(begun.milliseconds_until(&event).unwrap() >= 0.0);
        let untimed = device.event().unwrap();
        untimed.record().unwrap();
        device.synchronize().unwrap();
        assert!(begun.milliseconds_until(&untimed).is_err(), "the event has no time");
        assert!(device.copy(buffers[0].slice(), half(1, 0..4)).is_err());
        assert!(device.upload(&host, 4, buffers[0].slice()).is_err());
    });
}

#[test]
fn a_failed_device_computes_nothing_more_and_reports_why() {
    let device = Device::emulated(Emulation::default());
    let mut buffer = device.copied(&[1; 4]).unwrap();
    assert_eq!(device.fault(), None);
    // Not every error spoils the device.
    device.fail(KernelError::Driver { call: "cuTest", reason: "a test".to_owned() });
    assert!(device.synchronize().is_err() && device.fault().is_none());
    let error = KernelError::DeviceFault {
        fault: Fault::Context,
        call: "cuTest",
        reason: "CUDA_ERROR_TEST".to_owned(),
    };
    device.fail(error.clone());
    assert_eq!(device.fault(), Some(error.clone()));
    assert_eq!(buffer.write(&[2; 4]), Err(error.clone()));
    assert_eq!(device.zeroed(4).err(), Some(error.clone()));
    let text = error.to_string();
    assert!(text.contains("cuTest failed: CUDA_ERROR_TEST; this process has to be restarted"), "{text}");
    assert_eq!(Device::emulated(Emulation::default()).fault(), None, "a new one works");
}

/// A kernel that reads an invalid address spoils the context for all of the process.
#[test]
#[ignore = "the other tests of its process lose their device; run it alone on a machine with a GPU"]
fn a_device_with_a_spoiled_context_is_refused_until_the_process_ends() {
    let compiler = Arc::new(on_device::compiler());
    let open = || Device::open(0, &compiler);
    let (device, other) = (open().unwrap(), open().unwrap());
    device.ready().unwrap();
    let out = device.zeroed(64).unwrap();
    let params = EmbeddingParams {
        tokens: Address(8),
        table: Address(8),
        out: out.address(),
        width: 32,
        vocabulary: 1,
        first: 0,
    };
    let launch = embedding::launch(&params, 1, Table::Plain).unwrap();
    // SAFETY: nothing is at these addresses, which the device reports. Nothing else uses the device.
    unsafe { device.launch(&launch, &params) }.unwrap();
    let error = device.synchronize().expect_err("the address is invalid");
    assert_eq!(error.fault(), Some(Fault::Context), "{error}");
    assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    assert!(other.fault().is_some() && other.zeroed(64).is_err(), "both have the context");
    drop((out, device, other));
    let refused = open().err().expect("the process has no other context");
    assert!(matches!(refused, KernelError::SpoiledContext { device: 0, .. }), "{refused}");
    assert!(contexts::spoiled().is_some_and(|(ordinal, _)| ordinal == 0));
}

#[test]
fn one_device_waits_for_another() {
    let [first, second] = [0, 1].map(|_| Device::emulated(Emulation::default()));
    let mut host = first.host_buffer(4).unwrap();
    host.bytes_mut().fill(9);
    let (from, to) = (first.zeroed(4).unwrap(), second.zeroed(4).unwrap());
    second.enable_peer_access(&first).unwrap();
    let event = first.event().unwrap();
    first.upload(&host, 0, from.slice()).unwrap();
    event.record().unwrap();
    second.wait(&event).unwrap();
    second.copy(from.slice(), to.slice()).unwrap();
    let mut bytes = [0; 4];
    to.read(&mut bytes).unwrap();
    assert_eq!(bytes, [9; 4]);
}

#[test]
fn a_queue_for_copies_has_the_memory_of_its_device_and_waits_for_events() {
    with_devices(|device| {
        let copies = device.copy_queue().unwrap();
        assert!(copies.shares_memory_with(device));
        let mut host = device.host_buffer(8).unwrap();
        let (buffer, large) = (device.zeroed(8).unwrap(), device.zeroed(64 << 20).unwrap());
        let event = device.event().unwrap();
        for value in 1..10 {
            let filled = device.copied(&[value; 8]).unwrap();
            // It takes long enough that the copy to the host is queued before the buffer changes.
            device.clear(large.slice()).unwrap();
            device.copy(filled.slice(), buffer.slice()).unwrap();
            event.record().unwrap();
            copies.wait(&event).unwrap();
            copies.download(buffer.slice(), &mut host, 0).unwrap();
            copies.synchronize().unwrap();
            assert_eq!(host.bytes(), [value; 8]);
        }
    });
    let device = Device::emulated(Emulation::default());
    let copies = device.copy_queue().unwrap();
    let error =
        KernelError::DeviceFault { fault: Fault::Context, call: "cuTest", reason: "a test".to_owned() };
    device.fail(error.clone());
    assert_eq!((copies.fault(), copies.synchronize()), (Some(error.clone()), Err(error)));
}

#[test]
fn only_copies_between_devices_take_slices_of_another_device() {
    check_two_devices(&[0, 1].map(|_| Device::emulated(Emulation::default())));
    if let Ok(2..) = gpu::probe().map(|devices| devices.len()) {
        let compiler = Arc::new(on_device::compiler());
        check_two_devices(&[0, 1].map(|ordinal| Device::open(ordinal, &compiler).unwrap()));
    }
}

fn check_two_devices([first, second]: &[Device; 2]) {
    let (theirs, own) = (first.copied(&[7; 8]).unwrap(), second.zeroed(8).unwrap());
    let mut host = second.host_buffer(8).unwrap();
    let mut bytes = [0; 8];
    let refusals = [
        second.upload(&host, 0, theirs.slice()),
        second.download(theirs.slice(), &mut host, 0),
        second.read(theirs.slice(), &mut bytes),
        second.clear(theirs.slice()),
        second.copy(own.slice(), theirs.slice()),
    ];
    for refused in refusals {
        let error = refused.expect_err("the memory of another device").to_string();
        assert!(error.contains(&first.name()) && error.contains("another device"), "{error}");
    }
    second.copy(theirs.slice(), own.slice()).unwrap();
    own.read(&mut bytes).unwrap();
    assert_eq!(bytes, [7; 8]);
    // A recording copies, too.
    own.device.clear(own.slice()).unwrap();
    let buffers = vec![Arc::new(own)];
    let copy = || second.copy(theirs.slice(), buffers[0].slice());
    let recording = second.record(buffers.clone(), copy).unwrap();
    recording.replay().unwrap();
    buffers[0].read(&mut bytes).unwrap();
    assert_eq!(bytes, [7; 8]);
}
