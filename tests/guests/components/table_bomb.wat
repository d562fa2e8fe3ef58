;; A command whose table grows until it hits the limit. No guest toolchain generates such code on its own.
(component
  (core module $bomb
    (table $table 1 funcref)
    (func (export "run") (result i32)
      (loop $again
        (if (i32.eq (table.grow $table (ref.null func) (i32.const 10000)) (i32.const -1)) (then unreachable))
        (br $again))
      unreachable))
  (core instance $bomb (instantiate $bomb))
  (func $run (result (result)) (canon lift (core func $bomb "run")))
  (instance $command (export "run" (func $run)))
  (export "wasi:cli/run@0.2.3" (instance $command)))
