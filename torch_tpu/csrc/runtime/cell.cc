#include "runtime/cell.h"

namespace torch_tpu {

void Cell::flush() {
  auto work = pending_;  // `set` drops the cell's own reference
  work->flush();
}

}  // namespace torch_tpu
