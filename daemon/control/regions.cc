#include "daemon/control/regions.h"

#include <sys/mman.h>

namespace sluice::daemon {
namespace {

Result<void> create_region(const std::string& name, uint64_t bytes, UniqueFd* fd, Mapping* mapping) {
  auto made = create_memfd(name, bytes);
  if (!made) return made.error();
  *fd = std::move(*made);
  auto mapped = Mapping::map(fd->get(), round_to_pages(bytes), Access::kReadWrite);
  if (!mapped) return mapped.error();
  *mapping = std::move(*mapped);
#ifdef MADV_POPULATE_WRITE
  // The pages are there; this enters them into the page table now rather than one fault at a time on a lane. Kernels
  // before 5.14 refuse it, which costs only those faults.
  ::madvise(mapping->data(), mapping->size(), MADV_POPULATE_WRITE);
#endif
  return {};
}

}  // namespace

Result<Regions> Regions::create(const std::string& name, uint64_t arena_bytes, uint32_t lanes) {
  Regions regions;
  const std::string prefix = "sluice-" + name + "-";
  if (auto made = create_region(prefix + "control", sizeof(ipc::ControlPage), &regions.control_fd_,
                                &regions.control_);
      !made.ok()) {
    return made.error();
  }
  if (auto made =
          create_region(prefix + "submit", sizeof(ipc::SubmitPage), &regions.submit_fd_, &regions.submit_);
      !made.ok()) {
    return made.error();
  }
  if (auto made = create_region(prefix + "arena", arena_bytes, &regions.arena_fd_, &regions.arena_);
      !made.ok()) {
    return made.error();
  }
  // Fresh memory is zero, which is what a new page of either kind consists of, but for its head.
  auto* page = regions.control();
  page->abi_version = ipc::kAbiVersion;
  page->lanes = lanes;
  if (auto sealed = seal_future_writes(regions.control_fd()); !sealed.ok()) return sealed.error();
  return regions;
}

Result<void> Regions::seal() {
  if (auto sealed = seal_future_writes(submit_fd()); !sealed.ok()) return sealed;
  return seal_future_writes(arena_fd());
}

}  // namespace sluice::daemon
