// The same call from C++: what the library says when the arguments are wrong.
#include <fa3.h>

#include <iostream>
#include <vector>

int main() {
  std::vector<float> query(4 * 64), key(6 * 64), output(4 * 64);

  fa3_forward_args args{};
  args.struct_size = sizeof args;
  args.query = fa3_dense(query.data(), FA3_FLOAT32, 1, 4, 1, 64);
  args.key = fa3_dense(key.data(), FA3_FLOAT32, 1, 6, 1, 64);
  args.value = fa3_dense(key.data(), FA3_FLOAT32, 1, 5, 1, 64);  // one row short
  args.output = fa3_dense(output.data(), FA3_FLOAT32, 1, 4, 1, 64);

  std::size_t bytes = 0;
  if (fa3_forward_workspace(&args, &bytes) != FA3_INVALID_SHAPE) return 1;
  std::cout << "refused, as it should be: " << fa3_last_error() << '\n';

  args.value = args.key;
  if (fa3_forward_workspace(&args, &bytes)) {
    std::cerr << fa3_last_error() << '\n';
    return 1;
  }
  std::vector<char> workspace(bytes);
  args.workspace = workspace.data();
  args.workspace_size = bytes;
  if (fa3_forward(&args)) {
    std::cerr << fa3_last_error() << '\n';
    return 1;
  }
  std::cout << "and now it ran\n";
}
